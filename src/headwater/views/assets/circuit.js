// A circuit, layers upward: width is the size of an edge's effect, colour its sign. A slider says how many of the
// strongest edges are drawn; hover an edge for its numbers, click a node for its edges.
hw.start(async (spec, root) => {
  const { nodes, edges, lines } = spec, all = edges.name.length;
  let count = Math.min(40, all), hovered = null, picked = null, focus = -1;
  const places = Object.entries(nodes), of = (i) => places.map(([, { at }]) => at[i]);
  const wide = Math.max(...of(1), 1), far = Math.max(...of(0), 1), room = Math.max(34, Math.min(64, Math.floor(420 / (far + 1))));
  const column = Math.max(46, Math.min(84, Math.floor((hw.room(630) - 70) / (wide + 1))));
  const [width, height] = [70 + (wide + 1) * column, 50 + far * room + 30];
  const spot = (node) => [40 + nodes[node].at[1] * column, height - 30 - nodes[node].at[0] * room];
  const top = Math.max(...edges.effect.map((one) => Math.abs(one ?? 0)), 1e-12);
  const digits = hw.digits(top), signed = (one) => hw.signed(one, digits);
  const dashes = { k: [6, 4], v: [2, 3] };
  const shown = () => lines.filter(([edge]) => edge < count);
  const touches = (line) => picked === null || String(line[1]) === picked || String(line[2]) === picked;
  // A curve from node to node; nodes on one column are gone around.
  const bend = ([, source, target, kind]) => {
    const [x0, y0] = spot(source), [x1, y1] = spot(target), side = { q: 10, k: -10 }[kind] || 0;
    const out = Math.abs(x0 - x1) < 1 ? -Math.min(34, 12 + 0.14 * (y0 - y1)) : side;
    return [x0, y0, x0 + out, y0 + 0.45 * (y1 - y0), x1 + out, y1 - 0.45 * (y1 - y0), x1, y1];
  };
  const along = (c, t) => [0, 1].map((i) => (1 - t) ** 3 * c[i] + 3 * t * (1 - t) ** 2 * c[2 + i] + 3 * t * t * (1 - t) * c[4 + i] + t ** 3 * c[6 + i]);
  const paint = (pen) => {
    pen.clearRect(0, 0, width, height);
    for (const line of shown().reverse()) {
      const effect = edges.effect[line[0]] ?? 0, share = Math.sqrt(Math.abs(effect) / top), c = bend(line);
      pen.strokeStyle = hw.onPaper(spec.colors[effect < 0 ? 1 : 0]);
      pen.globalAlpha = touches(line) ? 0.35 + 0.6 * share : 0.08;
      pen.lineWidth = (line[0] === hovered ? 2 : 0) + 0.6 + 4.4 * share;
      pen.setLineDash(dashes[line[3]] || []);
      pen.beginPath();
      pen.moveTo(c[0], c[1]);
      pen.bezierCurveTo(...c.slice(2));
      pen.stroke();
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    const part = new Set(shown().flatMap(([, a, b]) => [String(a), String(b)]));
    pen.textAlign = "center";
    for (const [node, { name }] of places) {
      const [x, y] = spot(node), said = name.replace("head ", ""), half = 6 + 3.4 * said.length;
      if (!part.has(node)) continue;
      pen.fillStyle = hw.ink("--paper");
      pen.strokeStyle = hw.ink(node === picked ? "--accent" : "--faint");
      pen.lineWidth = node === picked ? 2.5 : 1;
      pen.fillRect(x - half, y - 9, 2 * half, 18);
      pen.strokeRect(x - half, y - 9, 2 * half, 18);
      pen.fillStyle = hw.ink("--ink");
      pen.fillText(said, x, y + 4);
    }
    pen.fillStyle = hw.ink("--faint");
    hw.upward(pen, "layers →", 10, height / 2);
  };
  const about = (edge) => [`${edges.name[edge]}: ${edges.effect[edge] === null ? "no effect is known" : signed(edges.effect[edge])}`,
    spec.examples === null ? "its interval and placebo: view(edges=...)" : edges.low[edge] === null ? "one example: no interval" : `95 % interval ${signed(edges.low[edge])} to ${signed(edges.high[edge])}, n = ${spec.examples}`,
    ...(spec.examples === null ? [] : [edges.placebo[edge] === null ? "no other edge of its shape" : `placebo: 95 % of ${edges.others[edge]} other edges of its shape are at most ${hw.number(edges.placebo[edge], digits)}`]),
    ...(edges.exact[edge] ? [] : ["an estimate, not a run"])];
  const canvas = hw.canvas(width, height, paint, { "data-main": "", role: "application", ariaLabel: `${spec.title}: arrow keys walk over edges, the strongest first; Enter shows those of its sender.` });
  const card = hw.element("div", { className: "card" });
  const row = (edge) => [edges.name[edge], ...["effect", "low", "high", "placebo"].map((name) => hw.exact(edges[name][edge] ?? NaN))];
  const columns = ["edge", "effect", "low", "high", "placebo"];
  const pick = (node) => {
    picked = node === picked ? null : node;
    const own = picked === null ? [] : [...new Set(shown().filter(touches).map(([edge]) => edge))];
    card.replaceChildren(...(picked === null ? [hw.element("p", { className: "faint" }, "Hover an edge for its effect, interval and placebo; click a node for its edges. Effects of edges in series do not add up. Into queries lines are drawn through, into keys dashed, into values dotted; red: above 0, blue: below.")]
      : [hw.element("h2", {}, `${nodes[picked].name}: ${own.length} edge${own.length === 1 ? "" : "s"} shown`), hw.element("div", { className: "scroll" }, hw.table({ columns, rows: own.map(row) }))]));
    canvas.draw();
  };
  const nodeAt = ([x, y]) => (places.find(([node]) => { const [a, b] = spot(node); return Math.abs(a - x) < 24 && Math.abs(b - y) < 11; }) || [null])[0];
  const edgeAt = ([x, y]) => {
    let best = null, least = 8 ** 2;
    for (const line of shown()) {
      const c = bend(line);
      for (let t = 0.04; t < 1; t += 0.02) { const [a, b] = along(c, t), apart = (a - x) ** 2 + (b - y) ** 2; if (apart < least) [best, least] = [line[0], apart]; }
    }
    return best;
  };
  canvas.addEventListener("pointermove", (event) => {
    const at = hw.place(canvas, event), node = nodeAt(at), edge = node === null ? edgeAt(at) : null;
    hw.tip(edge !== null ? about(edge) : node !== null ? [nodes[node].name, "click for its edges"] : null, event);
    if (edge !== hovered) { hovered = edge; canvas.draw(); }
  });
  canvas.addEventListener("pointerleave", () => { hovered = null; hw.tip(null); canvas.draw(); });
  canvas.addEventListener("click", (event) => { const node = nodeAt(hw.place(canvas, event)); if (node !== null) pick(node); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (move) { focus = hovered = Math.min(Math.max(focus + move, 0), count - 1); hw.say(about(focus).join(", ")); canvas.draw(); }
    else if (event.key === "Enter" && focus >= 0) pick(String(lines.find(([edge]) => edge === focus)[1]));
    else if (event.key === "Escape") { if (picked !== null) pick(picked); } else return;
    event.preventDefault();
  });
  // What the strongest edges do alone: at the slider's size, or at the nearest smaller one that was run.
  const alone = hw.element("p", { role: "status", "data-alone": "" });
  const judge = () => {
    const run = (spec.runs || []).filter((one) => one.edges <= count).pop(), said = (value) => hw.number(value, 2);
    if (!spec.runs) alone.textContent = `${count} of ${all} edges. How faithful they are alone was not run: view(runs=...).`;
    else if (!run) alone.textContent = `${count} of ${all} edges. The fewest that were run alone are ${spec.runs[0].edges}.`;
    else alone.textContent = `The ${run.edges} strongest edges alone${run.edges < count ? " (the nearest size below that was run)" : ""}: faithfulness ${said(run.faithfulness)}`
      + `${run.low === null ? "" : `, 95 % interval ${said(run.low)} to ${said(run.high)}`}, ${run.examples} prompt${run.examples === 1 ? "" : "s"}`
      + `${run.placebo === null ? "" : `; random circuits of their shape ${said(run.placebo)}, 95 % of them at most ${said(run.placebo_high)}`}.`;
  };
  const size = hw.slider("edges", 1, all, count, (to) => { count = to; judge(); hovered = null; if (focus >= count) focus = count - 1; if (picked !== null) { const node = picked; picked = null; pick(node); } canvas.draw(); });
  const numbers = () => ({ columns, rows: edges.name.slice(0, count).map((_, edge) => row(edge)) });
  pick(null);
  judge();
  hw.lay(root, spec.title, numbers, [size], alone, hw.element("div", { className: "sides" }, hw.element("div", { className: "scroll" }, canvas), card));
});
