// Head maps, one or several side by side and linked: hover a head for its relations, click for its card, filter by
// category and by relation, colour by one relation; a ring says that the running model uses the head.
hw.start(async (spec, root) => {
  const { maps, relations, labels } = spec;
  const state = { shown: labels.map(() => true), only: -1, colour: -1, rings: true, hovered: null, locked: null, focus: [0, 0] };
  const draw = () => grids.forEach((grid) => grid.canvas.draw());
  // The head that is pointed at, and what is at its place in the other maps.
  const point = (grid, at, event) => {
    const others = at && grids.length > 1 ? grids.filter((one) => one !== grid).map((one) => `${one.name}: ${one.title(at) || "no such head"}`) : [];
    const lines = at && [...(grids.length > 1 ? [`${grid.name}: ${grid.brief(at)[0]}`, ...grid.brief(at).slice(1)] : grid.brief(at)), ...others];
    hw.tip(event ? lines : null, event);
    if (at && !event) hw.say([...lines.slice(0, 2), ...others].join(", "));
    if (String(at) !== String(state.hovered)) { state.hovered = at; draw(); }
  };
  const card = hw.element("div", { className: "card" });
  const keep = (at) => {
    state.locked = String(state.locked) === String(at) ? null : at;
    card.replaceChildren(...(state.locked ? grids.flatMap((grid) => cardOf(grid, state.locked)) : [hint()]));
    draw();
  };
  const hint = () => hw.element("p", { className: "faint" }, "Hover a head for its relations; click, or press Enter, to keep its card here.");
  const cardOf = (grid, at) => {
    const title = grid.title(at), written = grid.written(at), [layer, head] = at;
    if (title === null) return [hw.element("p", { className: "faint" }, `${grid.name} has no head ${layer}.${head}.`)];
    const rows = grid.rows(layer * grid.heads + head).slice(0, 12), list = (tokens) => tokens.map(hw.token).join(" ");
    const writes = written ? hw.table({ columns: ["token", "gain", "writes", "suppresses"], rows: written.map(([token, sigma, up, down]) => [hw.token(token), hw.number(sigma, 2), list(up), list(down)]) })
      : hw.element("code", {}, `heads.salient(${layer}, ${head})`);
    return [hw.element("h2", {}, grids.length > 1 ? `${grid.name}: ${title}` : title), hw.element("div", { className: "scroll" }, hw.table({ columns: grid.columns, rows })),
      hw.element("h2", {}, written ? "What it writes, for the tokens it writes most strongly about" : "What it writes"), hw.element("div", { className: "scroll" }, writes)];
  };
  const grids = await Promise.all(maps.map((map) => hw.headGrid(map, spec, state, { point, keep })));
  grids[0].canvas.dataset.main = "";

  const counted = (counts) => `(${counts.join(" | ")})`;
  const legend = labels.map(({ name, color, shape }, i) => {
    const mark = hw.canvas(14, 14, (pen) => { pen.clearRect(0, 0, 14, 14); pen.fillStyle = hw.labelColor(name === spec.quiet, color); hw.mark(pen, shape, 7, 7, name === spec.quiet ? 4 : 5.5); }, { tabIndex: -1, className: "swatch", ariaHidden: true });
    const button = hw.toggle(` ${name} ${counted(maps.map((map) => map.counts[i]))}`, true, (on) => { state.shown[i] = on; draw(); });
    button.prepend(mark);
    button.dataset.label = name;
    return button;
  });
  if (grids.some((grid) => grid.isUsed)) {
    const ring = hw.canvas(14, 14, (pen) => { pen.clearRect(0, 0, 14, 14); hw.ring(pen, 7, 7, 5.5); }, { tabIndex: -1, className: "swatch", ariaHidden: true });
    const button = hw.toggle(` used ${counted(grids.map((grid) => (grid.isUsed ? grid.usedCount() : "–")))}`, true, (on) => { state.rings = on; draw(); });
    button.prepend(ring);
    button.dataset.label = "used";
    legend.push(button);
  }
  const only = hw.choice("heads of", ["all relations", ...relations], (i) => {
    state.only = i - 1;
    hw.say(`${grids.map((grid) => `${grid.name}: ${grid.shownCount()}`).join(", ")} heads shown`);
    draw();
  });
  const colours = hw.choice("colour by", ["categories", ...relations.map((one) => `excess on ${one}`)], (i) => { state.colour = i - 1; scale.hidden = i === 0; scale.draw(); draw(); });
  const numbers = () => ({ columns: [...(grids.length > 1 ? ["model"] : []), "layer", "head", "label", ...grids[0].columns.slice(0, 6)],
    rows: grids.flatMap((grid) => Array.from({ length: grid.layers * grid.heads }, (_, number) => grid.exact(number).map((row) =>
      [...(grids.length > 1 ? [grid.name] : []), Math.floor(number / grid.heads), number % grid.heads, grid.labelOf(number), ...row.slice(0, 6)])).flat()) });
  const scale = hw.scale(hw.sequential, () => ["0", "excess 1", 0.08], "Scale of the colours: the excess from 0 to 1");
  scale.hidden = true;
  const drawn = grids.map((grid) => hw.element("div", {}, ...(grids.length > 1 ? [hw.element("h2", {}, grid.name)] : []), hw.element("div", { className: "scroll" }, grid.canvas)));
  hw.lay(root, spec.title, numbers, [...legend, only, colours, scale], hw.element("div", { className: "sides" }, ...drawn, card));
  card.append(hint());
});
