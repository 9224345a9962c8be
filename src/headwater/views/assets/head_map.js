// Layer by head: a mark per head. Hover for its relations, click to keep its card, filter by category.
hw.start(async (spec, root) => {
  const [scores, expected, q, label] = await Promise.all([spec.score, spec.expected, spec.q, spec.label].map(hw.unpack));
  const { layers, heads, relations, labels } = spec;
  const known = relations.length;
  const excess = (at) => (Number.isFinite(expected[at]) ? (scores[at] - expected[at]) / (1 - expected[at]) : NaN);
  const strength = (at) => (Number.isFinite(excess(at)) ? excess(at) : scores[at]);
  const best = Array.from({ length: layers * heads }, (_, head) => {
    const order = [...Array(known).keys()].filter((r) => Number.isFinite(scores[head * known + r]));
    return order.sort((a, b) => strength(head * known + b) - strength(head * known + a));
  });
  const shown = labels.map(() => true);
  let relation = -1, hovered = null, locked = null, focus = 0;

  const cell = Math.max(9, Math.min(26, Math.floor(620 / layers), Math.floor(400 / heads)));
  const [left, bottom, top] = [44, 34, 8];
  const [width, height] = [left + layers * cell + 8, top + heads * cell + bottom];
  const middle = (layer, head) => [left + (layer + 0.5) * cell, top + (heads - head - 0.5) * cell];
  const name = (number) => `Head ${Math.floor(number / heads)}.${number % heads}`;

  const paint = (pen) => {
    pen.clearRect(0, 0, width, height);
    axes(pen);
    for (let number = 0; number < layers * heads; number++) {
      if (!shown[label[number]]) continue;
      const [x, y] = middle(Math.floor(number / heads), number % heads), { color, shape } = labels[label[number]];
      const at = best[number].length ? Math.max(0, strength(number * known + best[number][0])) : 0;
      const large = label[number] === 0 ? 0.2 : 0.42 * Math.sqrt(0.3 + 0.7 * Math.min(1, at));
      if (relation < 0) {
        pen.fillStyle = color;
        hw.mark(pen, shape, x, y, cell * large);
      } else {
        const value = strength(number * known + relation);
        pen.fillStyle = Number.isFinite(value) ? hw.sequential(0.08 + 0.92 * Math.max(0, value)) : "transparent";
        pen.fillRect(x - 0.46 * cell, y - 0.46 * cell, 0.92 * cell, 0.92 * cell);
      }
    }
    for (const number of new Set([hovered, locked])) {
      if (number === null) continue;
      const [x, y] = middle(Math.floor(number / heads), number % heads);
      pen.strokeStyle = hw.ink("--ink");
      pen.lineWidth = number === locked ? 2 : 1;
      pen.strokeRect(x - cell / 2, y - cell / 2, cell, cell);
    }
  };
  const axes = (pen) => {
    pen.fillStyle = pen.strokeStyle = hw.ink("--faint");
    pen.lineWidth = 0.5;
    pen.strokeRect(left, top, layers * cell, heads * cell);
    const step = (n) => [1, 2, 5, 10, 20, 50].find((s) => n / s <= 16);
    pen.textAlign = "center";
    for (let layer = 0; layer < layers; layer += step(layers)) pen.fillText(layer, middle(layer, 0)[0], height - bottom + 15);
    pen.textAlign = "right";
    for (let head = 0; head < heads; head += step(heads)) pen.fillText(head, left - 6, middle(0, head)[1] + 4);
    pen.textAlign = "center";
    pen.fillText("Layer", left + (layers * cell) / 2, height - 4);
    pen.save();
    pen.translate(11, top + (heads * cell) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText("Head", 0, 0);
    pen.restore();
  };

  const canvas = hw.canvas(width, height, paint, { "data-main": "", ariaLabel: `${spec.title}: layer by head. Arrow keys move, Enter keeps a head.`, role: "application" });
  const row = (number, r) => {
    const at = number * known + r;
    return [relations[r], hw.number(scores[at], 3), hw.number(expected[at], 3), hw.number(excess(at), 3), hw.small(q[at])];
  };
  const brief = (number) => [`${name(number)}: ${labels[label[number]].name}`,
    ...best[number].slice(0, 4).map((r) => { const [what, score, habit, over] = row(number, r);
      return `${what}: ${score}` + (over === "–" ? "" : `, by habit ${habit}, excess ${over}`); })];
  const card = hw.element("div", { className: "card" });
  const columns = ["relation", "score", "expected", "excess", "q"];
  const keep = (number) => {
    locked = locked === number ? null : number;
    card.replaceChildren();
    if (locked !== null) {
      const [layer, head] = [Math.floor(locked / heads), locked % heads];
      card.append(hw.element("h2", {}, `${name(locked)}: ${labels[label[locked]].name}`),
        hw.table({ columns, rows: best[locked].slice(0, 12).map((r) => row(locked, r)) }),
        hw.element("div", { className: "faint" }, "what it writes: ", hw.element("code", {}, `heads.salient(${layer}, ${head})`)));
    } else card.append(hint());
    canvas.draw();
  };
  const hint = () => hw.element("p", { className: "faint" }, "Hover a head for its relations; click, or press Enter, to keep it here.");
  const under = (event) => {
    const [x, y] = hw.place(canvas, event), layer = Math.floor((x - left) / cell), head = heads - 1 - Math.floor((y - top) / cell);
    return layer >= 0 && layer < layers && head >= 0 && head < heads ? layer * heads + head : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const number = under(event);
    hw.tip(number === null || !shown[label[number]] ? null : brief(number), event);
    if (number !== hovered) { hovered = number; canvas.draw(); }
  });
  canvas.addEventListener("pointerleave", () => { hovered = null; hw.tip(null); canvas.draw(); });
  canvas.addEventListener("click", (event) => { const number = under(event); if (number !== null) keep(number); });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: heads, ArrowLeft: -heads, ArrowUp: 1, ArrowDown: -1 };
    if (event.key in moves) {
      const next = focus + moves[event.key];
      const leaves = Math.abs(moves[event.key]) === 1 && Math.floor(next / heads) !== Math.floor(focus / heads);
      if (next >= 0 && next < layers * heads && !leaves) focus = next;
      hovered = focus;
      hw.say(brief(focus).slice(0, 2).join(", "));
      canvas.draw();
    } else if (event.key === "Enter") keep(focus);
    else if (event.key === "Escape" && locked !== null) keep(locked);
    else return;
    event.preventDefault();
  });

  const legend = labels.map(({ name: said, color, shape, count }, i) => {
    const mark = hw.canvas(14, 14, (pen) => { pen.clearRect(0, 0, 14, 14); pen.fillStyle = color; hw.mark(pen, shape, 7, 7, i === 0 ? 4 : 5.5); }, { tabIndex: -1 });
    mark.style.display = "inline-block";
    mark.style.verticalAlign = "-2px";
    const button = hw.toggle(` ${said} (${count})`, true, (on) => { shown[i] = on; canvas.draw(); });
    button.prepend(mark);
    button.dataset.label = said;
    return button;
  });
  const colours = hw.choice("colour by", ["categories", ...relations.map((one) => `excess on ${one}`)], (i) => { relation = i - 1; canvas.draw(); });
  const numbers = () => ({ columns: ["layer", "head", "label", ...columns],
    rows: best.flatMap((order, number) => order.map((r) => [Math.floor(number / heads), number % heads, labels[label[number]].name, ...row(number, r)])) });
  root.append(hw.element("header", {}, hw.element("h1", {}, spec.title), hw.tools(root, numbers)),
    hw.element("div", { className: "controls" }, ...legend, colours),
    hw.element("div", { className: "sides" }, hw.element("div", { className: "scroll" }, canvas), card));
  root.append(root.firstChild); // the table opened by its button stands last
  card.append(hint());
  hw.repaint();
});
