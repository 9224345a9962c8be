// A sweep over two axes as a heat map: site, metric, role, example and scale to choose; hover for a cell, drag for a
// query; a cell opens on its examples.
hw.start(async (spec, root) => {
  const scales = ["effect", "normalized_effect"].filter((name) => spec.panels.every((panel) => panel[name]));
  const panels = await Promise.all(spec.panels.map(async (panel) =>
    ({ ...panel, ...Object.fromEntries(await Promise.all(scales.map(async (name) => [name, await hw.unpack(panel[name])]))) })));
  let [at, example, scale] = [0, -1, "effect"];
  const MOST = 40; // examples of a cell that are listed
  let hovered = null, dragged = null, chosen = null, opened = false, focus = [0, 0];
  const panel = () => panels[at];
  const size = () => [panel().rows.length, panel().columns.length];

  // A cell's value: of one example, or the mean over those that have one.
  const each = (row, column) => {
    const [rows, columns] = size(), found = [];
    for (let e = 0; e < spec.examples; e++) found.push(panel()[scale][(e * rows + row) * columns + column]);
    return found;
  };
  const value = (row, column) => {
    if (example >= 0) return each(row, column)[example];
    const there = each(row, column).filter(Number.isFinite);
    return there.length ? there.reduce((sum, one) => sum + one, 0) / there.length : NaN;
  };
  const values = () => Array.from({ length: size()[0] }, (_, r) => Array.from({ length: size()[1] }, (_, c) => value(r, c)));
  const ticks = (axis) => {
    const places = panel()[axis];
    const tokens = axis === "columns" && panel().axes[1] === "position" ? shared() : null;
    return places.map((place) => (tokens && typeof place === "number" ? hw.token(tokens[place] ?? "") : hw.token(String(place))));
  };
  const shared = () => {
    const listed = example >= 0 ? [spec.tokens[example]] : spec.tokens;
    if (!listed.length || !listed[0]) return null;
    const alike = listed.every((one) => one.length === listed[0].length);
    return alike ? listed[0].map((token, i) => (listed.every((one) => one[i] === token) ? token : `e.g. ${token.trim()}`)) : null;
  };

  const geometry = () => {
    const [rows, columns] = size();
    const left = 34 + 6.6 * Math.min(24, Math.max(...ticks("rows").map((one) => one.length)));
    const cell = [Math.max(10, Math.min(34, Math.floor((hw.room(760) - left - 74) / columns))), Math.max(9, Math.min(24, Math.floor(420 / rows)))];
    const labels = ticks("columns"), longest = Math.max(...labels.map((one) => one.length));
    const bottom = longest > 3 ? 26 + Math.min(130, 6.2 * longest) : 40;
    return { rows, columns, cell, left, top: 8, bottom, longest, width: left + columns * cell[0] + 70, height: 8 + rows * cell[1] + bottom };
  };
  let g = geometry(), held = values(), limit = 0, digits = 3;
  const signed = (one) => hw.signed(one, digits);
  const paint = (pen) => {
    pen.clearRect(0, 0, g.width, g.height);
    for (let row = 0; row < g.rows; row++) for (let column = 0; column < g.columns; column++) {
      const [x, y] = corner(row, column), one = held[row][column];
      if (Number.isFinite(one)) {
        pen.fillStyle = hw.diverging(limit ? one / limit : 0);
        pen.fillRect(x, y, g.cell[0], g.cell[1]);
      } else hatch(pen, x, y);
    }
    labels(pen);
    scaleBar(pen);
    pen.strokeStyle = hw.ink("--ink");
    const framed = [hovered && [hovered, hovered, 1], chosen && [...chosen, 2]].filter(Boolean);
    for (const [a, b, line] of framed) {
      const [low, high] = [a, b].map((_, i) => [Math.min(a[i], b[i]), Math.max(a[i], b[i])]);
      const [x, y] = corner(low[1], high[0]);
      pen.lineWidth = line;
      pen.strokeRect(x, y, (high[1] - high[0] + 1) * g.cell[0], (low[1] - low[0] + 1) * g.cell[1]);
    }
  };
  const corner = (row, column) => [g.left + column * g.cell[0], g.top + (g.rows - 1 - row) * g.cell[1]];
  const hatch = (pen, x, y) => {
    pen.save();
    pen.beginPath();
    pen.rect(x, y, ...g.cell);
    pen.clip();
    pen.strokeStyle = hw.ink("--line");
    for (let d = -g.cell[1]; d < g.cell[0]; d += 4) { pen.beginPath(); pen.moveTo(x + d, y + g.cell[1]); pen.lineTo(x + d + g.cell[1], y); pen.stroke(); }
    pen.restore();
  };
  const labels = (pen) => {
    pen.fillStyle = hw.ink("--faint");
    const step = (n, room, need) => [1, 2, 5, 10, 20, 50, 100].find((s) => s * room >= need) || 200;
    const across = ticks("columns"), down = ticks("rows"), middle = g.left + (g.columns * g.cell[0]) / 2;
    for (let c = 0; c < g.columns; c += step(g.columns, g.cell[0], g.longest > 3 ? 11 : 22)) {
      const [x] = corner(0, c), y = g.top + g.rows * g.cell[1] + 13;
      pen.save();
      pen.translate(x + g.cell[0] / 2, y);
      if (g.longest > 3) { pen.rotate(-Math.PI / 3); pen.textAlign = "right"; } else pen.textAlign = "center";
      pen.fillText(across[c], 0, 0);
      pen.restore();
    }
    pen.textAlign = "right";
    for (let r = 0; r < g.rows; r += step(g.rows, g.cell[1], 12)) pen.fillText(down[r], g.left - 6, corner(r, 0)[1] + g.cell[1] / 2 + 4);
    pen.textAlign = "center";
    pen.fillText(panel().said[1], middle, g.height - 4);
    hw.upward(pen, panel().said[0], 11, g.top + (g.rows * g.cell[1]) / 2);
  };
  const scaleBar = (pen) => {
    const x = g.left + g.columns * g.cell[0] + 12, high = g.rows * g.cell[1];
    for (let i = 0; i < high; i++) { pen.fillStyle = hw.diverging(1 - (2 * i) / high); pen.fillRect(x, g.top + i, 10, 1.5); }
    pen.fillStyle = hw.ink("--faint");
    pen.textAlign = "left";
    const ends = limit < 10 ? digits - 1 : 1;
    pen.fillText(hw.signed(limit, ends), x + 13, g.top + 10);
    if (high > 40) pen.fillText("0", x + 13, g.top + high / 2 + 4);
    pen.fillText(hw.signed(-limit, ends), x + 13, g.top + high);
  };

  const canvas = hw.canvas(g.width, g.height, paint, { "data-main": "", role: "application", ariaLabel: `${spec.title}: arrow keys move, drag or Shift with arrows selects cells, Enter opens a cell's examples, Escape closes them.` });
  const card = hw.element("div", { className: "card" });
  const about = (row, column) => {
    const [one, two] = panel().axes, place = [panel().rows[row], panel().columns[column]], all = each(row, column).filter(Number.isFinite);
    const token = panel().axes[1] === "position" && shared() ? ` ${hw.token(shared()[place[1]] ?? "")}` : "";
    const lines = [`${one} ${place[0]}, ${two} ${place[1]}${token}: ${signed(value(row, column))}`];
    if (example >= 0) lines.push(`example ${spec.names[example]}`);
    else if (!all.length) lines.push("no example has a value here");
    else {
      const alike = all.filter((v) => Math.sign(v) === Math.sign(value(row, column))).length;
      const sign = value(row, column) ? `; ${alike} of them ${alike === 1 ? "has" : "have"} its sign` : "";
      lines.push(`mean of ${all.length}${sign}`, `from ${signed(Math.min(...all))} to ${signed(Math.max(...all))}`);
    }
    return lines;
  };
  const redraw = () => {
    [g, held] = [geometry(), values()];
    const flat = panels[at][scale].filter(Number.isFinite);
    limit = example >= 0 ? flat.reduce((most, one) => Math.max(most, Math.abs(one)), 0) : Math.max(0, ...held.flat().filter(Number.isFinite).map(Math.abs));
    digits = hw.digits(limit);
    canvas.resize(g.width, g.height);
  };
  const literal = (place) => (typeof place === "string" ? hw.python(place) : place);
  const query = () => {
    const [[r1, c1], [r2, c2]] = chosen, [one, two] = panel().axes;
    const span = (name, places, a, b) => {
      const some = places.slice(Math.min(a, b), Math.max(a, b) + 1);
      return some.length === places.length ? [] : [`${name} in [${some.map(literal).join(", ")}]`];
    };
    const parts = [`site == ${literal(panel().site)}`, `metric == ${literal(panel().metric)}`, ...span(one, panel().rows, r1, r2), ...span(two, panel().columns, c1, c2)];
    for (const [axis, place] of Object.entries(panel().fixed)) parts.push(`${axis} == ${literal(place)}`);
    if (example >= 0) parts.push(`example == ${spec.names[example]}`);
    return `sweep.table.query(${hw.python(parts.join(" and "), "'")})`;
  };
  const told = () => {
    card.replaceChildren();
    if (!chosen) { card.append(hw.element("p", { className: "faint" }, "Hover a cell; drag over cells to get them as a query of the table.")); return; }
    const [[r1, c1], [r2, c2]] = chosen, inside = held.slice(Math.min(r1, r2), Math.max(r1, r2) + 1).flatMap((row) => row.slice(Math.min(c1, c2), Math.max(c1, c2) + 1));
    const there = inside.filter(Number.isFinite);
    card.append(hw.element("h2", {}, `${inside.length} cell${inside.length > 1 ? "s" : ""} selected`),
      hw.element("div", {}, there.length ? `mean ${signed(there.reduce((s, v) => s + v, 0) / there.length)}, from ${signed(Math.min(...there))} to ${signed(Math.max(...there))}` : "none has a value"),
      hw.element("p", {}, hw.element("code", {}, query())),
      inside.length > 1 ? hw.element("p", { className: "faint" }, "Effects of cells do not add up: edit them together to know what they do together.") : byExample(r1, c1));
  };
  // What a cell's mean is made of, from the largest effect to the smallest.
  const byExample = (row, column) => {
    if (spec.examples < 2) return "";
    const there = each(row, column).map((one, e) => [spec.names[e], one]).filter(([, one]) => Number.isFinite(one)).sort((a, b) => b[1] - a[1]);
    const rows = there.slice(0, MOST).map(([name, one]) => hw.element("tr", {}, hw.element("td", {}, String(name)), hw.element("td", { className: "n" }, signed(one))));
    const left = there.length > MOST ? [hw.element("p", { className: "faint" }, `and ${there.length - MOST} more`)] : [];
    const heading = hw.element("summary", {}, `its ${there.length} examples`);
    const box = hw.element("details", { open: opened }, heading, hw.element("table", {}, hw.element("tbody", {}, ...rows)), ...left);
    heading.addEventListener("click", () => { opened = !box.open; });
    return box;
  };
  const under = (event) => {
    const [x, y] = hw.place(canvas, event), column = Math.floor((x - g.left) / g.cell[0]), row = g.rows - 1 - Math.floor((y - g.top) / g.cell[1]);
    return row >= 0 && row < g.rows && column >= 0 && column < g.columns ? [row, column] : null;
  };
  canvas.addEventListener("pointerdown", (event) => { const cell = under(event); if (cell) { dragged = cell; chosen = [cell, cell]; canvas.setPointerCapture(event.pointerId); told(); canvas.draw(); } });
  canvas.addEventListener("pointermove", (event) => {
    const cell = under(event);
    hw.tip(cell ? about(...cell) : null, event);
    if (dragged && cell) { chosen = [dragged, cell]; told(); }
    if (String(cell) !== String(hovered) || dragged) { hovered = cell; canvas.draw(); }
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointerleave", () => { hovered = null; hw.tip(null); canvas.draw(); });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (move) {
      const next = focus.map((place, i) => Math.min(Math.max(place + move[i], 0), size()[i] - 1));
      chosen = event.shiftKey && chosen ? [chosen[0], next] : [next, next];
      hovered = focus = next;
      hw.say(about(...next).join(", "));
      hw.follow(canvas, g.left + (next[1] + 0.5) * g.cell[0]);
    } else if (event.key === "Enter") {
      chosen = chosen || [focus, focus];
      opened = !opened;
    } else if (event.key === "Escape") {
      if (opened) opened = false;
      else chosen = hovered = null;
    } else return;
    told();
    canvas.draw();
    event.preventDefault();
  });

  const reset = () => { chosen = hovered = null; opened = false; focus = [0, 0]; told(); redraw(); };
  const choices = [];
  // A switch for each column that separates panels; where there is no panel of such a choice, the first of what was chosen.
  const kinds = ["site", "metric", "role"].map((kind) => [kind, [...new Set(panels.map((one) => one[kind]))]]).filter(([, names]) => names.length > 1);
  const switches = kinds.map(([kind, names]) => hw.choice(kind, names, (i) => {
    const wanted = { ...panel(), [kind]: names[i] }, fits = (one) => kinds.every(([other]) => one[other] === wanted[other]);
    const found = panels.findIndex(fits);
    at = found >= 0 ? found : panels.findIndex((one) => one[kind] === names[i]);
    kinds.forEach(([other, listed], k) => { switches[k].querySelector("select").value = listed.indexOf(panel()[other]); });
    reset();
  }));
  choices.push(...switches);
  if (spec.examples > 1) choices.push(hw.choice("example", [`mean of ${spec.examples}`, ...spec.names.map(String)], (i) => { example = i - 1; reset(); }));
  if (scales.length > 1) choices.push(hw.choice("value", scales.map((name) => name.replace("_", " ")), (i) => { scale = scales[i]; reset(); }));
  const numbers = () => ({ columns: [...panel().axes, scale],
    rows: held.flatMap((row, r) => row.map((one, c) => [panel().rows[r], panel().columns[c], hw.exact(one)])) });
  reset();
  window.addEventListener("resize", redraw);
  hw.lay(root, spec.title, numbers, choices, hw.element("div", { className: "sides" }, hw.element("div", { className: "scroll" }, canvas), card));
});
