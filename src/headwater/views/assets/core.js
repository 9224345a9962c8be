"use strict";
// What every view shares: numbers unpacked, tokens made visible, marks, colours, a tooltip, a table, light and dark.
const hw = {};

// Numbers: base64 of deflated little-endian u1, u2, f2 or f4, with their shape.
hw.unpack = async (packed) => {
  let bytes = hw.bytes(packed.data);
  if (packed.deflate) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  }
  const count = packed.shape.reduce((product, size) => product * size, 1);
  const size = { u1: 1, u2: 2, f2: 2, f4: 4 }[packed.dtype];
  if (bytes.length !== size * count) throw new Error(`${bytes.length} bytes where ${size * count} were expected`);
  if (packed.dtype === "u1") return bytes;
  if (packed.dtype === "f4") return new Float32Array(bytes.buffer);
  const whole = new Uint16Array(bytes.buffer);
  return packed.dtype === "u2" ? whole : Float32Array.from(whole, hw.half);
};

// Letter by letter a page of 8 MB takes a sixth of its time; browsers before 2025 know no other way.
hw.bytes = (base64) => {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const letters = atob(base64), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
};

hw.half = (bits) => {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
};

// Text: only ever as text, never as markup, and nothing in it unseen.
hw.element = (tag, properties = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && name !== "style") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.map((one) => (typeof one === "string" ? hw.visible(one) : one)));
  return made;
};

// What would not be seen, or would turn what is around it, is named.
hw.visible = (text) => {
  const hidden = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]/gu;
  const named = { "\n": "↵", "\t": "⇥" };
  return text.replace(hidden, (one) => named[one] || `⟨${one.codePointAt(0).toString(16)}⟩`);
};
hw.token = (text) => {
  if (text === "") return "∅";
  if (/^ +$/.test(text)) return "␣".repeat(text.length);
  const seen = hw.visible(text).replace(/^ /, "·");
  const letters = [...seen];
  return letters.length > 24 ? letters.slice(0, 23).join("") + "…" : seen;
};

hw.number = (value, digits = 3) => (Number.isFinite(value) ? value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1") : "–");
hw.signed = (value, digits = 3) => (value > 0 ? "+" : "") + hw.number(value, digits);
// A number of a table as it is, to six digits.
hw.exact = (value) => (Number.isFinite(value) ? Number(Number(value).toPrecision(6)) : "–");
// Decimals that show the largest of some numbers to three digits, and at least three.
hw.digits = (most) => (most > 0 && Number.isFinite(most) ? Math.min(9, Math.max(3, 2 - Math.floor(Math.log10(most)))) : 3);
// A text as Python writes it between such quotes.
hw.python = (text, quote = '"') => {
  const escaped = String(text).replace(/[\\"'\u0000-\u001f\u007f-\u{10ffff}]/gu, (one) => {
    const code = one.codePointAt(0);
    if (one === "\\" || one === quote) return `\\${one}`;
    if (one === '"' || one === "'" || (code > 0x9f && /[\p{L}\p{N}\p{P}\p{S}]/u.test(one))) return one;
    return code > 0xffff ? `\\U${code.toString(16).padStart(8, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
  return quote + escaped + quote;
};
hw.small = (value) => (!Number.isFinite(value) ? "–" : value < 0.001 ? "< 0.001" : value.toFixed(3));

// Colours.
hw.ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
hw.isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const between = (stops, share) => {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
  const mixed = stops[low].map((from, i) => Math.round(from + (at - low) * (stops[low + 1][i] - from)));
  return `rgb(${mixed.join(",")})`;
};
const SIGNED = [[5, 48, 97], [33, 102, 172], [67, 147, 195], [146, 197, 222], [209, 229, 240], [247, 247, 247],
  [253, 219, 199], [244, 165, 130], [214, 96, 77], [178, 24, 43], [103, 0, 31]];
const SIGNED_DARK = [[214, 236, 250], [146, 197, 222], [84, 152, 196], [50, 104, 150], [40, 64, 90], [40, 40, 43],
  [92, 52, 46], [150, 72, 58], [206, 104, 80], [240, 160, 130], [255, 224, 208]];
const LIGHT = [[255, 255, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]];
const DARK = [[27, 27, 29], [24, 58, 104], [40, 104, 170], [110, 170, 225], [225, 240, 255]];
hw.diverging = (share) => between(hw.isDark() ? SIGNED_DARK : SIGNED, (share + 1) / 2); // -1 to 1
hw.sequential = (share) => between(hw.isDark() ? DARK : LIGHT, share); // 0 to 1
// How unlikely a token is: 0 certain, 1 at the darkest; the same in light and dark, with its own ink.
const UNLIKELY = [[255, 255, 229], [255, 247, 188], [254, 227, 145], [254, 196, 79], [254, 153, 41], [236, 112, 20], [204, 76, 2], [153, 52, 4], [102, 37, 6]];
hw.unlikely = (share) => between(UNLIKELY, share);
hw.overUnlikely = (share) => (share > 0.65 ? "#ffffff" : "#262626");
// A colour of the figures as it can be seen on the page's paper: the darkest ones are lifted on dark paper.
hw.onPaper = (color) => {
  const parts = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)), light = 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  if (!hw.isDark() || light > 120) return color;
  const lift = (125 - light) / 255;
  return `rgb(${parts.map((one) => Math.round(one + (255 - one) * lift)).join(",")})`;
};
hw.overSequential = (share) => ((share > 0.55) !== hw.isDark() ? "#ffffff" : "#111111");

// Marks, as matplotlib names them.
hw.mark = (pen, shape, x, y, radius) => {
  const corners = (n, turn, inner) => {
    for (let i = 0; i < n; i++) {
      const r = inner && i % 2 ? radius * inner : radius, angle = turn + (2 * Math.PI * i) / n;
      pen.lineTo(x + r * Math.sin(angle), y - r * Math.cos(angle));
    }
  };
  pen.beginPath();
  if (shape === "s") pen.rect(x - 0.86 * radius, y - 0.86 * radius, 1.72 * radius, 1.72 * radius);
  else if (shape === "^") corners(3, 0);
  else if (shape === "D") corners(4, 0);
  else if (shape === "p") corners(5, 0);
  else if (shape === "h") corners(6, 0);
  else if (shape === "*") corners(10, 0, 0.45);
  else if (shape === "P") {
    pen.rect(x - radius, y - radius / 3, 2 * radius, (2 * radius) / 3);
    pen.rect(x - radius / 3, y - radius, (2 * radius) / 3, 2 * radius);
  } else pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.closePath();
  pen.fill();
};

// A circle around a place, and a text that is read upward.
hw.ring = (pen, x, y, radius, ink = "--ink", line = 1.1) => {
  pen.strokeStyle = hw.ink(ink);
  pen.lineWidth = line;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.stroke();
};
hw.upward = (pen, text, x, y) => {
  pen.save();
  pen.translate(x, y);
  pen.rotate(-Math.PI / 2);
  pen.fillText(text, 0, 0);
  pen.restore();
};

// A canvas that is drawn again when light turns to dark; `paint(pen)` draws in CSS pixels. One without a label is an
// ornament, which neither the keyboard nor a screen reader meets.
const painted = [];
hw.canvas = (width, height, paint, properties = {}) => {
  const made = hw.element("canvas", { ...(properties.ariaLabel ? { tabIndex: 0 } : { tabIndex: -1, ariaHidden: "true" }), ...properties });
  made.draw = () => {
    const ratio = window.devicePixelRatio || 1;
    made.width = Math.round(width * ratio);
    made.height = Math.round(height * ratio);
    made.style.width = `${width}px`;
    made.style.height = `${height}px`;
    const pen = made.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    paint(pen);
  };
  made.resize = (w, h) => { [width, height] = [w, h]; made.draw(); };
  painted.push(made);
  return made;
};
// How wide a drawing may be, so that it is seen without scrolling where that is possible.
hw.room = (most, least = 260) => Math.max(least, Math.min(most, document.documentElement.clientWidth - 30));
// The colours of a drawing between the numbers at its ends, which are read whenever it is drawn.
hw.scale = (ramp, ends, label) => hw.canvas(200, 28, (pen) => {
  pen.clearRect(0, 0, 200, 28);
  const [low, high, from] = ends();
  for (let i = 0; i < 180; i++) { pen.fillStyle = ramp(from + ((1 - from) * i) / 180); pen.fillRect(10 + i, 2, 1.5, 9); }
  pen.fillStyle = hw.ink("--faint");
  pen.font = "11px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.fillText(low, 10, 23);
  pen.textAlign = "right";
  pen.fillText(high, 190, 23);
}, { tabIndex: -1, role: "img", ariaLabel: label });
hw.repaint = () => painted.forEach((one) => one.draw());
// Space does what Enter does, as on a button; without this it would scroll the page.
addEventListener("keydown", (event) => {
  if (event.key !== " " || !event.target.matches("canvas, [role=option]")) return;
  event.preventDefault();
  event.target.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", shiftKey: event.shiftKey, bubbles: true }));
});
// Scroll the frame of a drawing that is wider than it, so that what the keys reach is seen.
hw.follow = (canvas, x) => {
  const frame = canvas.parentElement, from = x - frame.scrollLeft;
  if (from < 40 || from > frame.clientWidth - 40) frame.scrollLeft = x - frame.clientWidth / 2;
};
hw.place = (canvas, event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

// The tooltip: lines of text, the first one bold.
hw.tip = (lines, event) => {
  if (!hw.tipBox) document.body.append((hw.tipBox = hw.element("div", { className: "tip", hidden: true })));
  hw.tipBox.hidden = !lines;
  if (!lines) return;
  hw.tipBox.replaceChildren(...lines.map((line) => hw.element("div", {}, line)));
  const box = hw.tipBox.getBoundingClientRect();
  hw.tipBox.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6))}px`;
  hw.tipBox.style.top = `${Math.max(4, event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16)}px`;
};

// What a screen reader reads: it listens to a place that was there before the words.
hw.said = null;
hw.listen = () => document.body.append((hw.said = hw.element("div", { className: "quiet", "aria-live": "polite" })));
hw.say = (text) => { hw.said.textContent = hw.visible(text); };

hw.table = ({ columns, rows }) => {
  const isNumber = (value) => typeof value === "number" || value === "–" || /^(< )?[+-]?\d+(\.\d+)?$/.test(value);
  const numeric = columns.map((_, i) => rows.length > 0 && rows.every((row) => isNumber(row[i])));
  const cell = (tag, value, i) => hw.element(tag, { className: numeric[i] ? "n" : "" }, String(value));
  const head = hw.element("tr", {}, ...columns.map((name, i) => cell("th", name, i)));
  const body = rows.map((row) => hw.element("tr", {}, ...row.map((value, i) => cell("td", value, i))));
  return hw.element("table", {}, hw.element("thead", {}, head), hw.element("tbody", {}, ...body));
};

hw.choice = (label, names, act) => {
  const select = hw.element("select", { ariaLabel: label }, ...names.map((name, i) => hw.element("option", { value: i }, name)));
  select.addEventListener("change", () => act(Number(select.value)));
  return hw.element("label", {}, `${label} `, select);
};

hw.slider = (label, low, high, at, act) => {
  const slide = hw.element("input", { type: "range", min: low, max: high, value: at, ariaLabel: label });
  const now = hw.element("output", {}, String(at));
  slide.addEventListener("input", () => { now.textContent = slide.value; act(Number(slide.value)); });
  return hw.element("label", {}, `${label} `, slide, " ", now);
};

hw.toggle = (name, on, act) => {
  const button = hw.element("button", { type: "button", className: on ? "on" : "" }, name);
  button.setAttribute("aria-pressed", on);
  button.addEventListener("click", () => {
    on = !on;
    button.classList.toggle("on", on);
    button.setAttribute("aria-pressed", on);
    act(on);
  });
  return button;
};

const quoted = (value) => (value === "–" ? "" : /[",\r\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
hw.keep = (name, kind, content) => {
  const link = hw.element("a", { href: URL.createObjectURL(new Blob([content], { type: kind })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

// The buttons that every view has: theme, numbers as a table, numbers as a file.
hw.tools = (below, numbers) => {
  const theme = hw.element("button", { type: "button", title: "light or dark", ariaLabel: "light or dark" }, "◐");
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = hw.isDark() ? "light" : "dark";
    hw.repaint();
  });
  const table = hw.element("button", { type: "button" }, "table");
  const held = hw.element("div", { className: "scroll", hidden: true });
  table.addEventListener("click", () => {
    held.hidden = !held.hidden;
    held.replaceChildren(...(held.hidden ? [] : [hw.table(numbers())]));
  });
  const file = hw.element("button", { type: "button" }, "CSV");
  file.addEventListener("click", () => {
    const { columns, rows } = numbers();
    hw.keep("view.csv", "text/csv", [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n");
  });
  below.append(held);
  return hw.element("span", { className: "controls", style: "margin:0" }, theme, table, file);
};

// A view from top to bottom: title and buttons, what can be chosen, what is drawn, and the table that its button opens.
hw.lay = (root, title, numbers, choices, ...parts) => {
  root.append(hw.element("header", {}, hw.element("h1", {}, title), hw.tools(root, numbers)),
    hw.element("div", { className: "controls" }, ...choices), ...parts);
  root.append(root.firstChild); // the table
  hw.repaint();
};

// Draw the view, and say how long that took since the page was requested; where it fails, the picture below stays, with a line that says why.
hw.start = async (draw) => {
  const spec = JSON.parse(document.getElementById("spec").textContent);
  const look = document.getElementById("look");
  hw.listen();
  try {
    await draw(spec, look);
    if (spec.note) look.querySelector("header").after(hw.element("p", { className: "faint" }, spec.note));
    document.getElementById("still").hidden = true;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", hw.repaint);
    document.documentElement.dataset.seconds = (performance.now() / 1000).toFixed(3);
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    look.replaceChildren(hw.element("p", { className: "failed" }, `This view could not be drawn here: ${error.message}`));
    document.documentElement.dataset.ready = "no";
  }
};
