// Memorization by question depth: boxes with their dots, to be pointed at and opened; a score against the layer; and
// the scored tokens of one question.
hw.start(async (spec, root) => {
  const { depths, scores, rows, questions } = spec, values = await hw.unpack(spec.values), n = rows.depth.length;
  let score = Math.max(0, scores.indexOf(spec.main)), pointed = null, kept = null, boxes = [], plane = null;
  const drawn = (row) => -values[score * n + row];
  const quantile = (sorted, q) => {
    const at = q * (sorted.length - 1), low = Math.floor(at);
    return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
  };
  const boxOf = (depth) => {
    const found = [...Array(n).keys()].filter((row) => rows.depth[row] === depth && Number.isFinite(drawn(row)));
    const sorted = found.map(drawn).sort((a, b) => a - b);
    if (!sorted.length) return { depth, rows: [] };
    const [q1, median, q3] = [0.25, 0.5, 0.75].map((q) => quantile(sorted, q)), reach = 1.5 * (q3 - q1);
    const inside = sorted.filter((one) => one >= q1 - reach && one <= q3 + reach);
    return { depth, rows: found, q1, median, q3, low: inside[0], high: inside[inside.length - 1], mean: sorted.reduce((sum, one) => sum + one, 0) / sorted.length };
  };
  const fit = () => {
    boxes = depths.map(({ depth }) => boxOf(depth));
    const all = boxes.flatMap((box) => box.rows.map(drawn)), most = Math.max(0, ...all), least = Math.min(0, ...all);
    plane = hw.chart({ width: hw.room(150 + 130 * depths.length), height: 340, bottom: 52, y: { label: score === scores.indexOf(spec.main) ? spec.y : `minus ${scores[score]}`, low: least, high: most * 1.04 },
      x: { label: "", low: -0.6, high: depths.length - 0.4, names: boxes.map((box) => `Depth ${box.depth}\nn = ${box.rows.length}`) } });
  };
  // A dot is beside its box, at a place that follows from its row alone.
  const dot = (row, i) => [plane.x(i + 0.28 + 0.16 * ((row * 0.618034) % 1)), plane.y(drawn(row))];
  const paint = (pen) => {
    plane.frame(pen);
    boxes.forEach((box, i) => {
      if (!box.rows.length) return;
      const [left, right] = [plane.x(i - 0.3), plane.x(i + 0.22)], middle = (left + right) / 2, ink = hw.ink("--ink");
      pen.strokeStyle = ink;
      pen.lineWidth = pointed && pointed[0] === "box" && pointed[1] === i ? 2.5 : 1;
      for (const [from, to] of [[box.low, box.q1], [box.q3, box.high]]) hw.path(pen, [[middle, plane.y(from)], [middle, plane.y(to)]]);
      for (const end of [box.low, box.high]) hw.path(pen, [[middle - 9, plane.y(end)], [middle + 9, plane.y(end)]]);
      pen.fillStyle = depths[i].color;
      pen.fillRect(left, plane.y(box.q3), right - left, plane.y(box.q1) - plane.y(box.q3));
      pen.strokeRect(left, plane.y(box.q3), right - left, plane.y(box.q1) - plane.y(box.q3));
      pen.lineWidth = 2.2;
      hw.path(pen, [[left, plane.y(box.median)], [right, plane.y(box.median)]]);
      pen.fillStyle = hw.ink("--faint");
      pen.globalAlpha = 0.55;
      for (const row of box.rows) hw.mark(pen, depths[i].shape, ...dot(row, i), 2.6);
      pen.globalAlpha = 1;
    });
    for (const row of [kept, pointed && pointed[0] === "row" ? pointed[1] : null]) if (row !== null && Number.isFinite(drawn(row))) {
      const i = depths.findIndex(({ depth }) => depth === rows.depth[row]);
      hw.ring(pen, ...dot(row, i), 6, "--accent", 2);
    }
  };
  const named = (row) => `${spec.unit} ${hw.token(String(rows.name[row]))}, depth ${rows.depth[row]}`;
  const about = ([kind, which]) => {
    if (kind === "row") return [`${named(which)}: ${hw.number(drawn(which))}`];
    const box = boxes[which];
    return [`Depth ${box.depth}: median ${hw.number(box.median)}`, `quartiles ${hw.number(box.q1)} and ${hw.number(box.q3)}`, `whiskers ${hw.number(box.low)} and ${hw.number(box.high)}`, `mean ${hw.number(box.mean)}, n = ${box.rows.length}`];
  };
  const under = (event) => {
    const [x, y] = hw.place(canvas, event), i = Math.round(plane.x(0) === plane.x(1) ? 0 : (x - plane.x(0)) / (plane.x(1) - plane.x(0)));
    const box = boxes[i];
    if (!box || !box.rows.length || !plane.has([x, y])) return null;
    if (x >= plane.x(i - 0.3) && x <= plane.x(i + 0.22)) return ["box", i];
    let best = null, least = 14 ** 2;
    for (const row of box.rows) { const [a, b] = dot(row, i), far = (a - x) ** 2 + (b - y) ** 2; if (far < least) [best, least] = [row, far]; }
    return best === null ? null : ["row", best];
  };
  fit();
  const canvas = hw.canvas(plane.width, plane.height, paint, { "data-main": "", role: "application", ariaLabel: `${spec.title}: left and right walk over depths, up and down over what is in one; Enter opens it.` });
  const point = (place, event) => {
    pointed = place;
    hw.tip(place && event ? about(place) : null, event);
    if (place && !event) hw.say(about(place).join(", "));
    canvas.draw();
  };
  const card = hw.element("div", { className: "card" });
  const hint = () => card.replaceChildren(hw.element("p", { className: "faint" }, "Hover a box for its quartiles, a dot for its value; click a dot to open its questions."));
  const open = (row) => {
    kept = kept === row ? null : row;
    if (kept === null) hint();
    else {
      const here = questions.filter((one) => one.name === rows.name[row] && one.depth === rows.depth[row]).slice(0, 8);
      card.replaceChildren(hw.element("h2", {}, `${named(row)}: ${hw.number(drawn(row))}`), ...(here.length ? here.flatMap(question) : [hw.element("p", { className: "faint" }, "Its questions are not in this page.")]));
    }
    canvas.draw();
  };
  const question = (one) => {
    const told = `answer ${one.answer}${one.said === null ? "" : `; the model says ${one.said}`}${one.score === null ? "" : `, judged ${one.score} of 5`}`;
    const strip = hw.strip(one.tokens, (at, event) => hw.tip(at === null || !event ? null : [`${hw.token(one.tokens[at])}: log p ${hw.number(one.log_probability[at])}`, ...(one.lowest[at] ? ["among the lowest K %"] : [])], event), "Scored tokens");
    strip.shade(one.log_probability.map((p) => Math.min(1, Math.max(0, p / -10))), hw.unlikely, hw.overUnlikely);
    strip.marks.forEach((mark, i) => mark.classList.toggle("lowest", one.lowest[i]));
    strip.box.classList.add("likely");
    return [hw.element("div", {}, one.question), hw.element("div", { className: "faint" }, told), strip.box];
  };
  canvas.addEventListener("pointermove", (event) => point(under(event), event));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", (event) => { const place = under(event); if (place && place[0] === "row") open(place[1]); });
  canvas.addEventListener("keydown", (event) => {
    const i = pointed ? (pointed[0] === "box" ? pointed[1] : depths.findIndex(({ depth }) => depth === rows.depth[pointed[1]])) : -1;
    const across = { ArrowRight: 1, ArrowLeft: -1 }[event.key], up = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (across) point(["box", Math.min(Math.max(i + across, 0), depths.length - 1)]);
    else if (up && i >= 0) {
      const order = [...boxes[i].rows].sort((a, b) => drawn(a) - drawn(b)), at = pointed[0] === "row" ? order.indexOf(pointed[1]) + up : up > 0 ? 0 : order.length - 1;
      if (order.length) point(["row", order[Math.min(Math.max(at, 0), order.length - 1)]]);
    } else if (event.key === "Enter" && pointed && pointed[0] === "row") open(pointed[1]);
    else if (event.key === "Escape") { if (kept !== null) open(kept); point(null); } else return;
    event.preventDefault();
  });
  const curves = spec.by_layer ? hw.curves(spec.by_layer) : null;
  if (curves) delete curves.canvas.dataset.main;
  const choices = [hw.choice("score", scores, (i) => { score = i; fit(); canvas.draw(); })];
  choices[0].querySelector("select").value = score;
  const numbers = () => ({ columns: [spec.unit, "depth", scores[score]], rows: rows.name.map((name, row) => [hw.token(String(name)), rows.depth[row], hw.exact(values[score * n + row])]) });
  window.addEventListener("resize", () => { fit(); canvas.resize(plane.width, plane.height); });
  hint();
  hw.lay(root, spec.title, numbers, choices, hw.element("div", { className: "sides" }, hw.element("div", { className: "scroll" }, canvas), card),
    ...(curves ? [hw.element("h2", {}, spec.by_layer.said.title), hw.element("div", { className: "controls" }, ...curves.switches), curves.legend, hw.element("div", { className: "scroll" }, curves.canvas)] : []));
});
