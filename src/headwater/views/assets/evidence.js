// Evidence for a relation: maps of its heads, linked. A head that is kept in one is marked in all, in the tables below,
// and has a card with all its numbers.
hw.start(async (spec, root) => {
  const { layers, heads, columns, maps } = spec, values = await hw.unpack(spec.values), count = layers * heads;
  const state = { hovered: null, locked: null, focus: spec.named };
  const valuesOf = (column) => values.subarray(columns.indexOf(column) * count, (columns.indexOf(column) + 1) * count);
  const of = (column, [layer, head]) => valuesOf(column)[layer * heads + head];
  const named = (at) => `Head ${at.join(".")}`;
  const brief = (at) => [named(at), ...maps.map(({ name, column }) => `${name}: ${hw.number(of(column, at))}`)];
  const draw = () => planes.forEach((plane) => plane.draw());
  const point = (at, event) => {
    hw.tip(at && event ? brief(at) : null, event);
    if (at && !event) hw.say(brief(at).join(", "));
    if (String(at) !== String(state.hovered)) { state.hovered = at; draw(); }
  };
  const card = hw.element("div", { className: "card scroll" });
  const carried = (layer) => spec.when.charts[0].lines.map((line) => [`share of gap ${line.name}, before layer ${layer}`, hw.number(line.value[line.at.indexOf(layer)] ?? NaN)]);
  const keep = (at) => {
    state.locked = String(state.locked) === String(at) ? null : at;
    const rows = () => [...columns.map((name) => [name, hw.number(of(name, at))]), ...[at[0], at[0] + 1].filter((layer) => layer < layers).flatMap(carried)];
    card.replaceChildren(...(state.locked ? [hw.element("h2", {}, named(at)), hw.table({ columns: ["", "value"], rows: rows() })]
      : [hw.element("p", { className: "faint" }, "Hover a head for its numbers; click, or press Enter, to mark it everywhere.")]));
    tables.forEach(({ about }, i) => about.forEach((some, row) => drawn[i].tBodies[0].rows[row].classList.toggle("kept", state.locked !== null && some.includes(at.join(".")))));
    draw();
  };
  const planes = maps.map(({ name, column }) => {
    const shown = valuesOf(column), largest = shown.reduce((most, one) => (Number.isFinite(one) ? Math.max(most, Math.abs(one)) : most), 0);
    const paint = (pen, { cell, middle }) => shown.forEach((value, number) => {
      if (!Number.isFinite(value)) return;
      const [x, y] = middle(Math.floor(number / heads), number % heads);
      pen.fillStyle = hw.diverging(largest ? value / largest : 0);
      pen.fillRect(x - cell / 2, y - cell / 2, cell, cell);
    });
    const plane = hw.headPlane({ layers, heads, label: name, width: 380 }, state, { paint, point, keep });
    plane.scale = hw.scale((share) => hw.diverging(2 * share - 1), () => [hw.number(-largest), hw.number(largest), 0], `Scale of the colours of ${name}`);
    return plane;
  });
  planes[0].dataset.main = "";
  const { tables } = spec, drawn = tables.map((table) => hw.table({ columns: table.columns, rows: table.rows.map((row) => row.map((one) => (typeof one === "number" || one === null ? hw.number(one ?? NaN) : one))) }));
  const curves = hw.curves(spec.when);
  delete curves.canvas.dataset.main;
  const numbers = () => ({ columns: ["layer", "head", ...columns],
    rows: Array.from({ length: count }, (_, number) => [Math.floor(number / heads), number % heads]).map((at) => [...at, ...columns.map((name) => hw.exact(of(name, at)))]) });
  const scrolled = (...parts) => hw.element("div", { className: "scroll" }, ...parts);
  hw.lay(root, spec.title, numbers, [], hw.element("div", { className: "sides" },
    ...planes.map((plane, i) => hw.element("div", {}, hw.element("h2", {}, maps[i].name), scrolled(plane), plane.scale)), card),
    hw.element("div", { className: "sides" }, hw.element("div", {}, hw.element("h2", {}, spec.when.said.title), curves.legend, scrolled(curves.canvas)), ...drawn.map((table) => scrolled(table))));
  keep(spec.named);
});
