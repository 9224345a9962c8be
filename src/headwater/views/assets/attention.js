// Attention patterns of texts, one at a time: a thumbnail for each head, one enlarged, and the text itself, in which a
// token shows what it reads and who reads it. Weights are kept as the square roots of 8 bits, off by at most 0.004, key
// by key: of a causal pattern those that are not 0.
hw.start(async (spec, root) => {
  const { layers, heads, texts } = spec, count = layers.length * heads.length, hasNorms = Boolean(texts[0].norms);
  let [weighted, reads, picked, hovered] = [false, true, [0, 0], null];
  let asked, text, tokens, T, causal, roots, norms, per, strip; // of the text that is shown
  const number = ([l, h]) => l * heads.length + h, name = ([l, h]) => `${layers[l]}.${heads[h]}`;
  const raw = (head, query, key) => (causal && key > query ? 0 : (roots[head * per + (causal ? (key * (2 * T - 1 - key)) / 2 : key * T) + query] / 255) ** 2);
  const weight = (head, query, key) => raw(head, query, key) * (weighted ? norms[head * T + key] : 1);
  const share = (head, query, key) => weight(head, query, key) / image(head).scale;
  const eachEntry = (act) => { let i = 0; for (let k = 0; k < T; k++) for (let q = causal ? k : 0; q < T; q++) act(i++, q, k); };

  // Of each head its thumbnail, in which every pixel is the largest weight below it, so that thin diagonals stay, and
  // the largest weight times norm, to which its colours are scaled.
  const side = Math.max(18, Math.min(44, Math.floor((hw.room(642) - 44) / heads.length) - 3)), gap = 3, room = 42, over = 30;
  const images = new Map();
  let pixels, keys; // by entry
  const image = (head) => {
    if (images.has(head)) return images.get(head);
    const n = Math.min(side, T), most = new Float32Array(n * n), begin = head * per;
    let scale = 255;
    if (weighted) {
      scale = 1e-12;
      for (let i = 0; i < per; i++) {
        const one = roots[begin + i] * Math.sqrt(norms[head * T + keys[i]]);
        if (one > most[pixels[i]]) { most[pixels[i]] = one; if (one > scale) scale = one; }
      }
    } else for (let i = 0; i < per; i++) if (roots[begin + i] > most[pixels[i]]) most[pixels[i]] = roots[begin + i];
    for (let i = 0; i < n * n; i++) most[i] = (most[i] / scale) ** 2;
    images.set(head, { most, scale: weighted ? (scale / 255) ** 2 : 1 });
    return images.get(head);
  };
  const open = async (which) => {
    asked = which;
    const pattern = await hw.unpack(texts[which].pattern), written = hasNorms ? await hw.unpack(texts[which].norms) : null;
    if (asked !== which) return; // another was chosen meanwhile
    text = texts[which];
    ({ tokens, causal } = text);
    [T, roots, norms] = [tokens.length, pattern, written];
    per = causal ? (T * (T + 1)) / 2 : T * T;
    [pixels, keys] = [new Uint32Array(per), new Uint16Array(per)];
    const n = Math.min(side, T);
    eachEntry((i, q, k) => { pixels[i] = Math.floor((q * n) / T) * n + Math.floor((k * n) / T); keys[i] = k; });
    images.clear();
    hovered = null;
    const listed = hw.strip(tokens, (at) => shade(at), "Tokens of the text");
    if (strip) strip.box.replaceWith(listed.box);
    strip = listed;
    edge = cellOf() >= 9 ? 12 + Math.min(90, 6.4 * Math.max(...tokens.map((one) => hw.token(one).length))) : 22;
  };

  // Shares from 0 to 1 as pictures of n × n pixels side by side, all written at once: a canvas is slow to take over pixels.
  const sheet = document.createElement("canvas");
  let ramp = null;
  const colours = () => ramp || (ramp = Uint32Array.from({ length: 256 }, (_, i) => {
    const [red, green, blue] = hw.sequential(i / 255).match(/\d+/g).map(Number);
    return 0xff000000 + (blue << 16) + (green << 8) + red;
  }));
  const stamp = (across, down, n, sharesOf) => {
    const width = n * across, color = colours();
    [sheet.width, sheet.height] = [width, n * down];
    const into = sheet.getContext("2d"), held = into.createImageData(width, n * down), dots = new Uint32Array(held.data.buffer);
    for (let one = 0; one < across * down; one++) {
      const shares = sharesOf(one), begin = Math.floor(one / across) * n * width + (one % across) * n;
      for (let i = 0; i < n * n; i++) dots[begin + Math.floor(i / n) * width + (i % n)] = color[Math.min(255, Math.round(255 * shares[i]))];
    }
    into.putImageData(held, 0, 0);
  };
  const corner = (l, h) => [room + h * (side + gap), over + l * (side + gap)];
  const thumbs = hw.canvas(...corner(layers.length, heads.length), (pen) => {
    ramp = null;
    pen.clearRect(0, 0, ...corner(layers.length, heads.length).reverse());
    pen.fillStyle = hw.ink("--paper");
    pen.fillRect(0, 0, ...corner(layers.length, heads.length));
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.fillStyle = hw.ink("--faint");
    heads.forEach((head, h) => { if (side >= 16 || h % 2 === 0) pen.fillText(head, corner(0, h)[0] + side / 2, over - 5); });
    pen.fillText("head", room + (heads.length * (side + gap)) / 2, 11);
    hw.upward(pen, "layer", 11, over + (layers.length * (side + gap)) / 2);
    layers.forEach((layer, l) => pen.fillText(layer, 28, corner(l, 0)[1] + side / 2 + 4));
    const n = Math.min(side, T);
    stamp(heads.length, layers.length, n, (head) => image(head).most);
    pen.imageSmoothingEnabled = false;
    for (let head = 0; head < count; head++) {
      const at = [Math.floor(head / heads.length), head % heads.length], chosen = head === number(picked);
      pen.drawImage(sheet, at[1] * n, at[0] * n, n, n, ...corner(...at), side, side);
      pen.strokeStyle = hw.ink(chosen ? "--accent" : "--line");
      pen.lineWidth = chosen ? 2.5 : 1;
      pen.strokeRect(...corner(...at), side, side);
    }
  }, { role: "application", "data-thumbs": "", ariaLabel: "Heads, layer by layer: arrow keys choose the one that is enlarged, Enter goes to its pattern." });

  // The head chosen: query downward, key across.
  let edge = 22, shares = null;
  const cellOf = () => Math.max(3, Math.min(22, Math.floor(hw.room(400) / T)));
  const extent = () => edge + T * cellOf() + 4;
  const big = hw.canvas(100, 100, (pen) => {
    const cell = cellOf(), head = number(picked);
    ramp = null;
    pen.clearRect(0, 0, extent(), extent());
    if (!shares) { shares = new Float32Array(T * T); eachEntry((_, q, k) => { shares[q * T + k] = share(head, q, k); }); }
    stamp(1, 1, T, () => shares);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(sheet, edge, edge, T * cell, T * cell);
    pen.fillStyle = hw.ink("--lift");
    if (causal) for (let q = 0; q < T - 1; q++) pen.fillRect(edge + (q + 1) * cell, edge + q * cell, (T - q - 1) * cell, cell);
    pen.fillStyle = hw.ink("--faint");
    pen.font = `${Math.min(12, cell + 1)}px system-ui, sans-serif`;
    if (cell >= 9) tokens.forEach((token, i) => {
      pen.textAlign = "right";
      pen.fillText(hw.token(token), edge - 4, edge + (i + 0.5) * cell + 4);
      pen.textAlign = "left";
      hw.upward(pen, hw.token(token), edge + (i + 0.5) * cell + 4, edge - 4);
    });
    else { pen.textAlign = "center"; pen.fillText("key", edge + (T * cell) / 2, 14); hw.upward(pen, "query", 12, edge + (T * cell) / 2); }
    if (hovered) {
      pen.strokeStyle = hw.ink("--accent");
      pen.lineWidth = 1;
      pen.strokeRect(edge, edge + hovered[0] * cell, T * cell, cell);
      pen.strokeRect(edge + hovered[1] * cell, edge, cell, T * cell);
    }
  }, { "data-main": "", role: "application", ariaLabel: "The pattern of the head chosen, query downward and key across: arrow keys walk over its cells, Enter keeps the query's token, Escape frees it and goes back to the heads. The table has its numbers." });
  const told = ([q, k]) => [`${hw.token(tokens[q])} (${q}) reads ${hw.token(tokens[k])} (${k}): ${hw.number(raw(number(picked), q, k), 2)}`,
    ...(hasNorms ? [`times the norm of what it writes: ${hw.number(raw(number(picked), q, k) * norms[number(picked) * T + k], 2)}`] : [])];
  big.addEventListener("pointermove", (event) => {
    const [k, q] = hw.place(big, event).map((one) => Math.floor((one - edge) / cellOf()));
    hovered = q >= 0 && q < T && k >= 0 && k < T && !(causal && k > q) ? [q, k] : null;
    hw.tip(hovered && told(hovered), event);
    big.draw();
  });
  big.addEventListener("pointerleave", () => { hovered = null; hw.tip(null); big.draw(); });
  big.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (move) {
      const [q, k] = hovered ? hovered.map((one, i) => Math.min(Math.max(one + move[i], 0), T - 1)) : [T - 1, 0];
      hovered = [q, causal ? Math.min(k, q) : k];
      hw.say(told(hovered).join(", "));
    } else if (event.key === "Enter" && hovered) {
      strip.locked = hovered[0];
      strip.tell(hovered[0]);
    } else if (event.key === "Escape") {
      strip.locked = hovered = null;
      strip.tell(null);
      thumbs.focus();
    } else return;
    big.draw();
    event.preventDefault();
  });

  // The token that is pointed at, and how strongly the others are read by it, or read it.
  const heading = hw.element("h2", {});
  const shade = (at) => {
    const head = number(picked), strengths = at === null ? null : tokens.map((_, i) => (reads ? share(head, at, i) : share(head, i, at)));
    strip.shade(strengths, hw.sequential, hw.overSequential);
    if (at === null) heading.textContent = `Head ${name(picked)}: point at a token, click to keep it`;
    else {
      const top = [...strengths.keys()].sort((a, b) => strengths[b] - strengths[a]).slice(0, 3).filter((i) => strengths[i] > 0);
      const said = top.map((i) => `${hw.token(tokens[i])} ${hw.number(reads ? weight(head, at, i) : weight(head, i, at), 2)}`).join(", ");
      heading.textContent = `Head ${name(picked)}: ${hw.token(tokens[at])} ${reads ? "reads" : "is read by"} ${said || "nothing"}`;
      hw.say(heading.textContent);
    }
  };
  const again = () => { shares = null; thumbs.draw(); scale.draw(); big.resize(extent(), extent()); strip.tell(null); };
  const pick = (at) => { picked = at; again(); };
  thumbs.addEventListener("click", (event) => {
    const [x, y] = hw.place(thumbs, event), h = Math.floor((x - room) / (side + gap)), l = Math.floor((y - over) / (side + gap));
    if (h >= 0 && h < heads.length && l >= 0 && l < layers.length) pick([l, h]);
  });
  thumbs.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (move) {
      pick([Math.min(Math.max(picked[0] + move[0], 0), layers.length - 1), Math.min(Math.max(picked[1] + move[1], 0), heads.length - 1)]);
      hw.say(heading.textContent);
    } else if (event.key === "Enter") big.focus();
    else return;
    event.preventDefault();
  });

  await open(0);
  const controls = [hw.choice("a token shows", ["what it reads", "who reads it"], (i) => { reads = i === 0; strip.tell(null); })];
  if (texts.length > 1) controls.unshift(hw.choice("text", texts.map((one) => one.name), async (i) => { await open(i); again(); }));
  if (hasNorms) controls.push(hw.choice("weights", ["attention", "attention × norm written, by head"], (i) => { weighted = i === 1; images.clear(); again(); }));
  const numbers = () => ({ columns: ["query", "query token", "key", "key token", "weight"], rows: tokens.flatMap((query, q) => tokens.slice(0, causal ? q + 1 : T)
    .map((key, k) => [q, hw.token(query), k, hw.token(key), hw.exact(Number(raw(number(picked), q, k).toFixed(4)))])) });
  const scale = hw.scale(hw.sequential, () => (weighted ? ["0", "the head's largest", 0] : ["0", "weight 1", 0]), "Scale of the colours");
  const pane = hw.element("div", { className: "scroll", style: "max-height:640px" }, big);
  hw.lay(root, spec.title, numbers, controls, heading, strip.box, scale, hw.element("div", { className: "sides" }, hw.element("div", { className: "scroll" }, thumbs), pane));
  again();
});
