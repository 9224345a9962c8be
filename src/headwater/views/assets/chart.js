"use strict";
// Two axes of numbers: where a number is on the canvas, the frame with round ticks, lines, marks and bands.
hw.chart = ({ width, height, x, y, left = 58, right = 14, top = 10, bottom = 40 }) => {
  const spread = (low, high) => (high > low ? [low, high] : [low - 0.5, high + 0.5]);
  const across = spread(x.low, x.high), up = spread(y.low, y.high);
  const plane = { width, height, left, top, right: width - right, bottom: height - bottom };
  const share = (value, [low, high]) => (value - low) / (high - low);
  plane.x = (value) => plane.left + share(value, across) * (plane.right - plane.left);
  plane.y = (value) => plane.bottom - share(value, up) * (plane.bottom - plane.top);
  plane.has = ([at, down]) => at >= plane.left - 8 && at <= plane.right + 8 && down >= plane.top - 8 && down <= plane.bottom + 8;

  plane.frame = (pen) => {
    pen.clearRect(0, 0, width, height);
    pen.lineWidth = 1;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "right";
    for (const value of hw.ticks(...up, 5)) {
      rule(pen, plane.left, plane.y(value), plane.right, plane.y(value));
      pen.fillText(hw.short(value), plane.left - 6, plane.y(value) + 4);
    }
    pen.textAlign = "center";
    const named = x.names ? x.names.map((_, i) => i) : hw.ticks(...across, Math.floor((plane.right - plane.left) / 60), x.whole);
    for (const value of named) {
      const lines = x.names ? String(x.names[value]).split("\n") : [hw.short(value)];
      lines.forEach((line, i) => pen.fillText(line, plane.x(value), plane.bottom + 16 + 13 * i));
    }
    pen.fillText(x.label, (plane.left + plane.right) / 2, height - 5);
    hw.upward(pen, y.label, 12, (plane.top + plane.bottom) / 2);
    if (up[0] < 0 && up[1] > 0) rule(pen, plane.left, plane.y(0), plane.right, plane.y(0), "--faint");
  };
  const rule = (pen, x0, y0, x1, y1, ink = "--line") => {
    pen.strokeStyle = hw.ink(ink);
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
    pen.fillStyle = hw.ink("--faint");
  };
  return plane;
};

// Round numbers from low to high, about so many; whole ones where the axis counts.
hw.ticks = (low, high, wanted, whole = false) => {
  const rough = (high - low) / Math.max(1, wanted), unit = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(whole ? 1 : 0, [1, 2, 5, 10].map((n) => n * unit).find((one) => one >= rough));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) found.push(i * step);
  return found;
};
hw.short = (value) => String(Number(value.toPrecision(4)));

// Connected points; a value that is not there interrupts the line.
hw.path = (pen, points) => {
  let apart = true;
  pen.beginPath();
  for (const [x, y] of points) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) { apart = true; continue; }
    if (apart) pen.moveTo(x, y); else pen.lineTo(x, y);
    apart = false;
  }
  pen.stroke();
};
hw.band = (pen, low, high) => {
  const whole = low.map((_, i) => i).filter((i) => [...low[i], ...high[i]].every(Number.isFinite));
  if (!whole.length) return;
  pen.beginPath();
  for (const i of whole) pen.lineTo(...low[i]);
  for (const i of whole.reverse()) pen.lineTo(...high[i]);
  pen.closePath();
  pen.fill();
};
