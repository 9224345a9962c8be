// Attention patterns of one text: a thumbnail for each head, one enlarged, and the text itself, in which a token shows
// what it reads and who reads it. Weights are kept as the square roots of 8 bits: off by at most 0.004.
hw.start(async (spec, root) => {
  const { tokens, layers, heads, causal } = spec, T = tokens.length;
  const roots = await hw.unpack(spec.pattern), norms = spec.norms ? await hw.unpack(spec.norms) : null;
  const per = causal ? (T * (T + 1)) / 2 : T * T;
  let [weighted, reads] = [false, true], picked = [0, 0], hovered = null, locked = null;

  const index = (query, key) => (causal ? (query * (query + 1)) / 2 + key : query * T + key);
  const raw = (layer, head, query, key) => {
    if (causal && key > query) return 0;
    return (roots[(layer * heads.length + head) * per + index(query, key)] / 255) ** 2;
  };
  const norm = (layer, head, key) => norms[(layer * heads.length + head) * T + key];
  // The largest value-weighted entry of a head, to which its colours are scaled.
  const largest = new Map();
  const scaleOf = (layer, head) => {
    if (!weighted) return 1;
    const name = layer * heads.length + head;
    if (!largest.has(name)) {
      let most = 1e-12;
      for (let q = 0; q < T; q++) for (let k = 0; k <= (causal ? q : T - 1); k++) most = Math.max(most, raw(layer, head, q, k) * norm(layer, head, k));
      largest.set(name, most);
    }
    return largest.get(name);
  };
  const weight = (layer, head, query, key) => raw(layer, head, query, key) * (weighted ? norm(layer, head, key) : 1);
  const share = (layer, head, query, key) => weight(layer, head, query, key) / scaleOf(layer, head);

  // Thumbnails: every pixel shows the largest weight below it, so that thin diagonals stay.
  const side = Math.max(18, Math.min(44, Math.floor(560 / heads.length))), gap = 3, room = 26;
  const thumbs = hw.canvas(room + heads.length * (side + gap), 16 + layers.length * (side + gap), (pen) => {
    pen.clearRect(0, 0, room + heads.length * (side + gap), 16 + layers.length * (side + gap));
    pen.fillStyle = hw.ink("--faint");
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    heads.forEach((head, h) => { if (side >= 16 || h % 2 === 0) pen.fillText(head, room + h * (side + gap) + side / 2, 11); });
    layers.forEach((layer, l) => {
      pen.fillStyle = hw.ink("--faint");
      pen.fillText(layer, 12, 16 + l * (side + gap) + side / 2 + 4);
      heads.forEach((_, h) => thumbnail(pen, l, h, room + h * (side + gap), 16 + l * (side + gap)));
    });
  }, { role: "application", "data-thumbs": "", ariaLabel: "Heads, layer by layer: arrow keys choose the one that is enlarged." });
  const thumbnail = (pen, l, h, x, y) => {
    const n = Math.min(side, T), step = side / n, most = new Float32Array(n * n);
    for (let q = 0; q < T; q++) for (let k = 0; k <= (causal ? q : T - 1); k++) {
      const at = Math.floor((q * n) / T) * n + Math.floor((k * n) / T);
      most[at] = Math.max(most[at], share(l, h, q, k));
    }
    pen.fillStyle = hw.sequential(0);
    pen.fillRect(x, y, side, side);
    for (let i = 0; i < n * n; i++) if (most[i] > 0.01) {
      pen.fillStyle = hw.sequential(most[i]);
      pen.fillRect(x + (i % n) * step, y + Math.floor(i / n) * step, step + 0.2, step + 0.2);
    }
    const chosen = l === picked[0] && h === picked[1];
    pen.strokeStyle = hw.ink(chosen ? "--accent" : "--line");
    pen.lineWidth = chosen ? 2.5 : 1;
    pen.strokeRect(x, y, side, side);
  };

  // The head chosen: query downward, key across.
  const cell = Math.max(3, Math.min(22, Math.floor(400 / T)));
  const edge = cell >= 9 ? 12 + Math.min(90, 6.4 * Math.max(...tokens.map((one) => hw.token(one).length))) : 22;
  const big = hw.canvas(edge + T * cell + 4, edge + T * cell + 4, (pen) => {
    const [l, h] = picked;
    pen.clearRect(0, 0, edge + T * cell + 4, edge + T * cell + 4);
    for (let q = 0; q < T; q++) for (let k = 0; k < T; k++) {
      pen.fillStyle = causal && k > q ? hw.ink("--lift") : hw.sequential(share(l, h, q, k));
      pen.fillRect(edge + k * cell, edge + q * cell, cell, cell);
    }
    pen.fillStyle = hw.ink("--faint");
    pen.font = `${Math.min(12, cell + 1)}px system-ui, sans-serif`;
    if (cell >= 9) tokens.forEach((token, i) => {
      pen.textAlign = "right";
      pen.fillText(hw.token(token), edge - 4, edge + (i + 0.5) * cell + 4);
      pen.save();
      pen.translate(edge + (i + 0.5) * cell + 4, edge - 4);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "left";
      pen.fillText(hw.token(token), 0, 0);
      pen.restore();
    });
    else { pen.textAlign = "center"; pen.fillText("key", edge + (T * cell) / 2, 14); pen.save(); pen.translate(12, edge + (T * cell) / 2); pen.rotate(-Math.PI / 2); pen.fillText("query", 0, 0); pen.restore(); }
    if (hovered && hovered.length) {
      pen.strokeStyle = hw.ink("--accent");
      pen.lineWidth = 1;
      pen.strokeRect(edge, edge + hovered[0] * cell, T * cell, cell);
      pen.strokeRect(edge + hovered[1] * cell, edge, cell, T * cell);
    }
  }, { "data-main": "", tabIndex: -1, ariaLabel: "The pattern of the head chosen: query by key. The table has its numbers." });
  big.addEventListener("pointermove", (event) => {
    const [x, y] = hw.place(big, event), [k, q] = [x, y].map((one) => Math.floor((one - edge) / cell));
    hovered = q >= 0 && q < T && k >= 0 && k < T && !(causal && k > q) ? [q, k] : null;
    hw.tip(hovered && [`${hw.token(tokens[q])} (${q}) reads ${hw.token(tokens[k])} (${k}): ${hw.number(raw(...picked, q, k), 2)}`,
      ...(norms ? [`times the norm of what it writes: ${hw.number(raw(...picked, q, k) * norm(...picked, k), 2)}`] : [])], event);
    big.draw();
  });
  big.addEventListener("pointerleave", () => { hovered = null; hw.tip(null); big.draw(); });

  // The text: the token that is pointed at, and how strongly the others are read by it, or read it.
  const heading = hw.element("h2", {}), strip = hw.element("div", { className: "tokens", role: "listbox", ariaLabel: "Tokens" });
  const shown = tokens.map((token, i) => {
    const made = hw.element("span", { className: "token", tabIndex: i ? -1 : 0, role: "option" }, hw.token(token));
    made.dir = "auto";
    made.addEventListener("pointerenter", () => { if (locked === null) shade(i); });
    made.addEventListener("click", () => { locked = locked === i ? null : i; shade(i); });
    made.addEventListener("focus", () => shade(i));
    return made;
  });
  strip.append(...shown);
  strip.addEventListener("pointerleave", () => { if (locked === null) shade(null); });
  strip.addEventListener("keydown", (event) => {
    const at = shown.indexOf(document.activeElement), next = at + { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && at >= 0) { locked = locked === at ? null : at; shade(at); }
    else if (event.key === "Escape") { locked = null; shade(null); }
    else if (shown[next]) { shown[next].tabIndex = 0; shown[next].focus(); }
    else return;
    event.preventDefault();
  });
  const shade = (token) => {
    const at = locked === null ? token : locked;
    const strengths = tokens.map((_, i) => (at === null ? 0 : reads ? share(...picked, at, i) : share(...picked, i, at)));
    shown.forEach((one, i) => {
      one.style.background = at === null ? "" : hw.sequential(strengths[i]);
      one.style.color = at === null ? "" : hw.overSequential(strengths[i]);
      one.style.borderBottomColor = i === at ? hw.ink("--accent") : "transparent";
      one.classList.toggle("locked", i === locked);
      one.setAttribute("aria-selected", i === locked);
    });
    const name = `Head ${layers[picked[0]]}.${heads[picked[1]]}`;
    if (at === null) heading.textContent = `${name}: point at a token, click to keep it`;
    else {
      const top = [...strengths.keys()].sort((a, b) => strengths[b] - strengths[a]).slice(0, 3).filter((i) => strengths[i] > 0);
      const said = top.map((i) => `${hw.token(tokens[i])} ${hw.number(reads ? weight(...picked, at, i) : weight(...picked, i, at), 2)}`).join(", ");
      heading.textContent = `${name}: ${hw.token(tokens[at])} ${reads ? "reads" : "is read by"} ${said || "nothing"}`;
      hw.say(heading.textContent);
    }
  };
  const pick = (l, h) => { picked = [l, h]; thumbs.draw(); big.draw(); shade(null); };
  thumbs.addEventListener("click", (event) => {
    const [x, y] = hw.place(thumbs, event), h = Math.floor((x - room) / (side + gap)), l = Math.floor((y - 16) / (side + gap));
    if (h >= 0 && h < heads.length && l >= 0 && l < layers.length) pick(l, h);
  });
  thumbs.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (!move) return;
    pick(Math.min(Math.max(picked[0] + move[0], 0), layers.length - 1), Math.min(Math.max(picked[1] + move[1], 0), heads.length - 1));
    hw.say(heading.textContent);
    event.preventDefault();
  });

  const all = () => { thumbs.draw(); big.draw(); shade(null); };
  const controls = [hw.choice("a token shows", ["what it reads", "who reads it"], (i) => { reads = i === 0; shade(null); })];
  if (norms) controls.push(hw.choice("weights", ["attention", "attention × norm written, by head"], (i) => { weighted = i === 1; all(); }));
  const numbers = () => ({ columns: ["query", "query token", "key", "key token", "weight"], rows: tokens.flatMap((query, q) => tokens.slice(0, causal ? q + 1 : T)
    .map((key, k) => [q, hw.token(query), k, hw.token(key), hw.number(raw(...picked, q, k), 3)])) });
  root.append(hw.element("header", {}, hw.element("h1", {}, spec.title), hw.tools(root, numbers)),
    hw.element("div", { className: "controls" }, ...controls), heading, strip,
    hw.element("div", { className: "sides" }, hw.element("div", { className: "scroll" }, thumbs), hw.element("div", { className: "scroll" }, big)));
  root.append(root.firstChild);
  shade(null);
  hw.repaint();
});
