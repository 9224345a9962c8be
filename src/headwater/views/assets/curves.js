"use strict";
// Lines with their intervals against one number: choose which, hover a point, lines in and out, arrow keys along them.
// A chart: { x, y, lines: [{ name, color, shape, dashed, control, at, value, low, high, count }] }; lists are as long as
// `at`, and what is not known is null.
hw.curves = ({ charts, choices, x, said }) => {
  const picked = choices.map(() => 0), hidden = new Set();
  let plane = null, pointed = null, digits = 3;
  const signed = (one) => hw.signed(one, digits);
  const chart = () => charts[choices.reduce((at, { names }, i) => at * names.length + picked[i], 0)];
  const lines = () => chart().lines.filter((line) => !hidden.has(line.name));
  const known = (list) => list.filter((one) => one !== null);

  const fit = () => {
    const seen = lines().length ? lines() : chart().lines;
    const values = seen.flatMap((line) => known([...line.value, ...(line.low || []), ...(line.high || [])]));
    const places = seen.flatMap((line) => line.at), low = Math.min(0, ...values), high = Math.max(0, ...values), room = 0.06 * (high - low || 1);
    digits = hw.digits(Math.max(...values.map(Math.abs), 0));
    plane = hw.chart({ width: hw.room(620), height: 340, x: { ...x, low: Math.min(...places), high: Math.max(...places) },
      y: { label: chart().y, low: low && low - room, high: high && high + room } });
  };
  const color = (line) => (line.control ? hw.ink("--faint") : hw.onPaper(line.color));
  const points = (line, column) => line.at.map((at, i) => [plane.x(at), line[column][i] === null ? NaN : plane.y(line[column][i])]);
  const paint = (pen) => {
    plane.frame(pen);
    for (const line of [...lines()].reverse()) {
      pen.fillStyle = pen.strokeStyle = color(line);
      pen.globalAlpha = 0.15;
      if (line.low) hw.band(pen, points(line, "low"), points(line, "high"));
      pen.globalAlpha = 1;
      pen.lineWidth = pointed && pointed[0] === line.name ? 2.6 : 1.6;
      pen.setLineDash(line.dashed ? [6, 4] : []);
      hw.path(pen, points(line, "value"));
      pen.setLineDash([]);
      for (const [at, up] of points(line, "value")) if (Number.isFinite(up)) hw.mark(pen, line.shape, at, up, 3.6);
    }
    const line = pointed && lines().find((one) => one.name === pointed[0]);
    if (!line) return;
    const [at, up] = points(line, "value")[pointed[1]];
    hw.ring(pen, at, up, 7, "--ink", 1.5);
  };
  const about = ([name, i]) => {
    const line = chart().lines.find((one) => one.name === name);
    const range = line.low && line.low[i] !== null ? [`95 % interval ${signed(line.low[i])} to ${signed(line.high[i])}`] : [];
    const count = line.count ? [`${Math.round(line.count[i])} ${said.count}`] : [];
    return [`${name}, ${said.x} ${hw.short(line.at[i])}: ${signed(line.value[i])}`, ...range, ...count];
  };
  fit();
  const canvas = hw.canvas(plane.width, plane.height, paint, { "data-main": "", role: "application", ariaLabel: `${said.title}: arrow keys left and right along a line, up and down from line to line.` });
  const point = (place, event) => {
    pointed = place;
    hw.tip(place && event ? about(place) : null, event);
    if (place && !event) hw.say(about(place).join(", "));
    canvas.draw();
  };
  const nearest = (event) => {
    const [x0, y0] = hw.place(canvas, event);
    if (!plane.has([x0, y0])) return null;
    let best = null, least = 40 ** 2;
    for (const line of lines()) points(line, "value").forEach(([at, up], i) => {
      const far = (at - x0) ** 2 + (up - y0) ** 2;
      if (far < least) [best, least] = [[line.name, i], far];
    });
    return best;
  };
  canvas.addEventListener("pointermove", (event) => point(nearest(event), event));
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("click", (event) => { const place = nearest(event); if (place) alone(place[0]); });
  canvas.addEventListener("keydown", (event) => {
    const there = lines(), at = Math.max(0, there.findIndex((line) => pointed && line.name === pointed[0]));
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") { hidden.clear(); redraw(); } else if (event.key === "Enter" && pointed) alone(pointed[0]);
    else if (move && there.length) {
      const line = there[(at + move[0] + there.length) % there.length];
      const valid = line.value.map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0);
      const now = pointed ? valid.findIndex((i) => i >= pointed[1]) : -1;
      const next = valid[Math.min(Math.max((now < 0 ? (pointed ? valid.length - 1 : 0) : now + move[1]), 0), valid.length - 1)];
      if (next !== undefined) point([line.name, next]);
    } else return;
    event.preventDefault();
  });
  // One line alone, and all again; controls stay beside it.
  const alone = (name) => {
    const others = chart().lines.filter((line) => line.name !== name && !line.control);
    const isAlone = !hidden.has(name) && others.every((line) => hidden.has(line.name));
    hidden.clear();
    if (!isAlone) for (const line of others) hidden.add(line.name);
    redraw();
  };
  const legend = hw.element("div", { className: "controls" });
  const redraw = () => {
    legend.replaceChildren(...chart().lines.map((line) => {
      const swatch = hw.canvas(30, 12, (pen) => {
        pen.clearRect(0, 0, 30, 12);
        pen.strokeStyle = pen.fillStyle = color(line);
        pen.lineWidth = 1.6;
        pen.setLineDash(line.dashed ? [6, 4] : []);
        hw.path(pen, [[0, 6], [30, 6]]);
        hw.mark(pen, line.shape, 15, 6, 3.6);
      }, { tabIndex: -1, className: "swatch" });
      const button = hw.toggle(` ${line.name}`, !hidden.has(line.name), (on) => { if (on) hidden.delete(line.name); else hidden.add(line.name); redraw(); });
      button.prepend(swatch);
      button.dataset.line = line.name;
      swatch.draw();
      return button;
    }));
    pointed = null;
    const heading = document.querySelector("#look h1");
    if (heading && chart().title) heading.textContent = document.title = chart().title;
    fit();
    canvas.resize(plane.width, plane.height);
  };
  window.addEventListener("resize", () => redraw());
  const switches = choices.map(({ label, names }, i) => hw.choice(label, names, (to) => { picked[i] = to; redraw(); }));
  const numbers = () => ({ columns: ["line", said.x, chart().y, "low", "high", said.count].slice(0, said.count ? 6 : 5),
    rows: lines().flatMap((line) => line.at.map((at, i) => [line.name, at, hw.exact(line.value[i]), hw.exact(line.low?.[i]), hw.exact(line.high?.[i]), ...(said.count ? [hw.exact(line.count?.[i])] : [])])) });
  redraw();
  return { switches, legend, canvas, numbers };
};
