"use strict";
// Layer by head on a canvas: `paint(pen, plane)` draws the heads. Which head is pointed at and which is kept is in
// `state`, which all planes of a page share: { hovered, locked, focus }, heads as [layer, head].
hw.headPlane = ({ layers, heads, label, width: wide = 620 }, state, { paint, isShown = () => true, point, keep }) => {
  const cell = Math.max(9, Math.min(26, Math.floor((hw.room(wide + 52) - 52) / layers), Math.floor(400 / heads)));
  const [left, bottom, top] = [44, 34, 8];
  const [width, height] = [left + layers * cell + 8, top + heads * cell + bottom];
  const middle = (layer, head) => [left + (layer + 0.5) * cell, top + (heads - head - 0.5) * cell];
  const has = ([layer, head]) => layer >= 0 && head >= 0 && layer < layers && head < heads;
  const draw = (pen) => {
    pen.clearRect(0, 0, width, height);
    axes(pen);
    paint(pen, { cell, middle });
    for (const [at, line] of [[state.hovered, 1], [state.locked, 2]]) {
      if (!at || !has(at)) continue;
      const [x, y] = middle(...at);
      pen.strokeStyle = hw.ink("--ink");
      pen.lineWidth = line;
      pen.strokeRect(x - cell / 2, y - cell / 2, cell, cell);
    }
  };
  const axes = (pen) => {
    pen.fillStyle = pen.strokeStyle = hw.ink("--faint");
    pen.lineWidth = 0.5;
    pen.strokeRect(left, top, layers * cell, heads * cell);
    const step = (n) => [1, 2, 5, 10, 20, 50].find((s) => n / s <= 16 && s * cell >= 18) || 50;
    pen.textAlign = "center";
    for (let layer = 0; layer < layers; layer += step(layers)) pen.fillText(layer, middle(layer, 0)[0], height - bottom + 15);
    pen.textAlign = "right";
    for (let head = 0; head < heads; head += step(heads)) pen.fillText(head, left - 6, middle(0, head)[1] + 4);
    pen.textAlign = "center";
    pen.fillText("Layer", left + (layers * cell) / 2, height - 4);
    hw.upward(pen, "Head", 11, top + (heads * cell) / 2);
  };

  const canvas = hw.canvas(width, height, draw, { "data-map": "", ariaLabel: `${label}, layer by head. Arrow keys move, Enter keeps a head, Escape frees it.`, role: "application" });
  const under = (event) => {
    const [x, y] = hw.place(canvas, event), at = [Math.floor((x - left) / cell), heads - 1 - Math.floor((y - top) / cell)];
    return has(at) && isShown(at) ? at : null;
  };
  canvas.addEventListener("pointermove", (event) => point(under(event), event));
  canvas.addEventListener("pointerleave", () => point(null, null));
  canvas.addEventListener("click", (event) => { const at = under(event); if (at) { state.focus = at; keep(at); } });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (move) {
      state.focus = [Math.min(Math.max(state.focus[0] + move[0], 0), layers - 1), Math.min(Math.max(state.focus[1] + move[1], 0), heads - 1)];
      point(state.focus, null);
      hw.follow(canvas, left + (state.focus[0] + 0.5) * cell);
    } else if (event.key === "Enter") keep(state.focus);
    else if (event.key === "Escape" && state.locked) keep(state.locked);
    else return;
    event.preventDefault();
  });
  return canvas;
};
