// The patch board: grids of cells and heads, one head's attention, and what the nodes that were clicked do. A page with
// a kernel asks it; one without a kernel knows all single nodes.
hw.start(async (spec, root) => {
  const { layers, heads, sites, live } = spec;
  const opened = async (held) => Object.fromEntries(await Promise.all(Object.entries(held).map(async ([name, one]) => [name, await hw.unpack(one)])));
  const known = {};
  for (const [how, held] of Object.entries(spec.known)) known[how] = await opened(held);
  const pattern = await opened(spec.pattern);
  let [how, site, picked, adding] = [spec.first, 0, [0, 0], false];
  const clicked = []; // what was clicked and not undone: {nodes, before, after, goal, top, layers, parts, seconds, code}
  const about = (of = how) => spec.hows[of], T = about().tokens.length;
  const token = (i, of) => hw.token(about(of).tokens[i]);
  const last = () => clicked[clicked.length - 1];
  const said = (n, of) => `${n.site} ${n.layer}${n.head === undefined ? "" : `.${n.head}`}${n.position === undefined ? "" : ` at ${token(n.position, of)} (${n.position})`}${n.key === undefined ? "" : `, reading ${token(n.key, of)} (${n.key})`}`;
  const alike = (a, b) => ["site", "layer", "position", "head", "key"].every((one) => a[one] === b[one]);

  // What the page knows by itself: the effect of one node, and of its parts.
  const stored = (n) => {
    const held = known[how];
    if (!held) return NaN;
    if (n.site === "pattern") return held.edges && n.position === about().query ? held.edges[(n.layer * heads + n.head) * (held.edges.length / (layers * heads)) + n.key] : NaN;
    if (n.site !== "z") return held.cells[(sites.indexOf(n.site) * layers + n.layer) * T + n.position];
    if (n.position === undefined) return held.heads[n.layer * heads + n.head];
    return held.places ? held.places[(n.layer * T + n.position) * heads + n.head] : NaN;
  };
  const partsOf = (n) => {
    if (n.site === "pattern") return [];
    if (n.site !== "z") return Array.from({ length: heads }, (_, head) => ({ site: "z", layer: n.layer, position: n.position, head }));
    const query = n.position === undefined ? about().query : n.position, end = spec.causal ? query + 1 : T;
    return Array.from({ length: end }, (_, key) => ({ site: "pattern", layer: n.layer, head: n.head, position: query, key }));
  };
  const fromPage = (nodes) => {
    const effect = nodes.length === 1 ? stored(nodes[0]) : NaN, { before, goal } = about();
    const parts = partsOf(nodes[0]).map((n) => ({ ...n, effect: stored(n) })).filter((n) => Number.isFinite(n.effect));
    const kind = { pattern: "edges", z: nodes[0].position === undefined ? "heads" : "places" }[nodes[0].site] || "cells";
    const code = about().code[kind].replace(/\{(\w+)\}/g, (_, name) => nodes[0][name]);
    return { nodes, how, before, goal, after: before + effect, top: [], layers: [], parts, code: Number.isFinite(effect) ? code : "" };
  };

  // The kernel: one question at a time, of those that wait the newest.
  let [asked, waiting, next, timers] = [null, 0, null, []];
  const status = hw.element("div", { className: "faint", role: "status" });
  const ask = (message) => {
    if (asked !== null) { next = message; return; }
    asked = ++waiting;
    window.parent.postMessage({ board: { id: asked, ...message } }, "*");
    timers = [setTimeout(() => { status.textContent = "waiting for the kernel …"; }, 150),
      setTimeout(() => { status.textContent = "No answer: is the kernel running?"; asked = null; }, 10000)];
  };
  window.addEventListener("message", async (event) => {
    const reply = event.source === window.parent && event.data && event.data.board;
    if (!reply || reply.id !== asked) return;
    timers.forEach(clearTimeout);
    asked = null;
    status.className = reply.kind === "error" ? "failed" : "faint";
    status.textContent = reply.kind === "error" ? reply.text : "";
    if (reply.kind === "known") { known[reply.how] = await opened(reply.known); show(); }
    if (reply.kind === "patched") done({ ...reply, parts: reply.parts.map((part) => nodeOf(reply.nodes[0], part)) });
    if (next) { const message = next; next = null; ask(message); }
  });
  const nodeOf = (whole, part) => ({ site: part.key === null ? "z" : "pattern", layer: whole.layer, position: part.position, head: part.head, effect: part.effect, ...(part.key === null ? {} : { key: part.key }) });
  const click = (node, more) => {
    const before = (more || adding) && clicked.length ? last().nodes : [];
    const nodes = before.some((one) => alike(one, node)) ? before.filter((one) => !alike(one, node)) : [...before, node];
    if (node.head !== undefined) picked = [node.layer, node.head];
    if (!nodes.length) return;
    if (live) ask({ how, nodes });
    else done(fromPage(nodes));
  };
  const done = (answer) => { clicked.push(answer); show(); hw.say(heading.textContent); };
  const undo = () => { if (clicked.pop() && live) window.parent.postMessage({ board: { undo: true } }, "*"); show(); };

  // A grid to point at and click: rows upward or downward, a colour and a sentence for each place.
  const grid = ({ rows, columns, size, down, fill, sentence, node, row, column, label, name }) => {
    const left = down ? 74 : 30, top = down ? 60 : 6, bottom = down ? 6 : name === "cells" ? 64 : 22;
    let [over, focus] = [null, [0, 0]];
    const place = (r, c) => [left + c * size, top + (down ? r : rows - 1 - r) * size];
    const [width, height] = [left + columns * size + 4, top + rows * size + bottom];
    const canvas = hw.canvas(width, height, (pen) => {
      pen.clearRect(0, 0, width, height);
      for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
        const [x, y] = place(r, c), colour = fill(r, c), n = node(r, c);
        pen.fillStyle = colour || hw.ink("--lift");
        pen.fillRect(x, y, size - 1, size - 1);
        if (n && clicked.length && last().nodes.some((one) => alike(one, n))) for (const [colour, wide] of [["#ffffff", 4], ["#111111", 2]]) { pen.strokeStyle = colour; pen.lineWidth = wide; pen.strokeRect(x + 1, y + 1, size - 3, size - 3); }
      }
      pen.fillStyle = hw.ink("--faint");
      pen.font = "11px system-ui, sans-serif";
      const step = Math.max(1, Math.ceil(11 / size));
      pen.textAlign = "right";
      for (let r = 0; r < rows; r += step) pen.fillText(row(r), left - 5, place(r, 0)[1] + size / 2 + 4);
      for (let c = 0; c < columns; c += step) {
        const x = left + (c + 0.5) * size;
        pen.textAlign = down ? "left" : name === "cells" ? "right" : "center";
        if (down) hw.upward(pen, column(c), x + 4, top - 4);
        else if (name === "cells") hw.upward(pen, column(c), x + 4, top + rows * size + 4);
        else pen.fillText(column(c), x, top + rows * size + 14);
      }
      if (over) { const [x, y] = place(...over); pen.strokeStyle = hw.ink("--accent"); pen.lineWidth = 2; pen.strokeRect(x, y, size - 1, size - 1); }
    }, { role: "application", [`data-${name}`]: "", ariaLabel: `${label} Arrow keys move, Enter changes, Shift and Enter adds.` });
    const under = (event) => {
      const [x, y] = hw.place(canvas, event), c = Math.floor((x - left) / size), r = Math.floor((y - top) / size), at = down ? r : rows - 1 - r;
      return c >= 0 && c < columns && at >= 0 && at < rows && node(at, c) ? [at, c] : null;
    };
    canvas.addEventListener("pointermove", (event) => { over = under(event); hw.tip(over && sentence(...over), event); canvas.draw(); });
    canvas.addEventListener("pointerleave", () => { over = null; hw.tip(null); canvas.draw(); });
    canvas.addEventListener("click", (event) => { const at = under(event); if (at) { focus = at; click(node(...at), event.shiftKey); } });
    canvas.addEventListener("keydown", (event) => {
      const up = down ? -1 : 1, move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [up, 0], ArrowDown: [-up, 0] }[event.key];
      if (move) {
        focus = [Math.min(Math.max(focus[0] + move[0], 0), rows - 1), Math.min(Math.max(focus[1] + move[1], 0), columns - 1)];
        over = focus;
        hw.say(sentence(...focus).join(", "));
        canvas.draw();
      } else if (event.key === "Enter") { if (node(...focus)) click(node(...focus), event.shiftKey); } else if (event.key === "Escape") undo();
      else return;
      event.preventDefault();
    });
    return canvas;
  };
  const scale = (held) => held.reduce((most, one) => (Number.isFinite(one) ? Math.max(most, Math.abs(one)) : most), 1e-9);
  const largest = {}; // by kind of change, of cells and of heads: what their colours end at
  const scales = () => (known[how] ? (largest[how] ||= [scale(known[how].cells), scale(known[how].heads)]) : [1, 1]);
  const signed = (effect) => hw.signed(effect, hw.digits(Math.max(...scales(), Math.abs(gap()))));
  const gap = (of) => about(of).goal - about(of).before;
  const share = (effect, of) => (Math.abs(gap(of)) > 1e-9 ? `, ${Math.round((100 * effect) / gap(of))} % of the way` : "");
  const told = (n) => [said(n), Number.isFinite(stored(n)) ? `effect ${signed(stored(n))}${share(stored(n))}` : live ? "click for its exact effect" : "not in this page: needs a kernel"];
  const cell = (r, c) => ({ site: sites[site], layer: r, position: c }), head = (r, c) => ({ site: "z", layer: r, head: c });
  const edge = (q, k) => (spec.causal && k > q ? null : { site: "pattern", layer: picked[0], head: picked[1], position: q, key: k });
  const weight = (q, k) => (pattern[about().run][((picked[0] * heads + picked[1]) * T + q) * T + k] / 255) ** 2;
  const cells = grid({ name: "cells", rows: layers, columns: T, size: Math.max(9, Math.min(24, Math.floor((hw.room(550) - 34) / T))), label: "Layer by token.",
    fill: (r, c) => (known[how] ? hw.diverging(stored(cell(r, c)) / scales()[0]) : null), sentence: (r, c) => told(cell(r, c)), node: cell, row: String, column: token });
  const byHead = grid({ name: "heads", rows: layers, columns: heads, size: Math.max(9, Math.min(24, Math.floor((hw.room(450) - 34) / heads))), label: "Layer by head, at all tokens.",
    fill: (r, c) => (known[how] ? hw.diverging(stored(head(r, c)) / scales()[1]) : null), sentence: (r, c) => told(head(r, c)), node: head, row: String, column: String });
  const reads = grid({ name: "reads", rows: T, columns: T, down: true, size: Math.max(7, Math.min(20, Math.floor((hw.room(420) - 78) / T))), label: "What the head picked reads: query by key.",
    fill: (q, k) => (spec.causal && k > q ? null : hw.sequential(weight(q, k))),
    sentence: (q, k) => (edge(q, k) ? [`${token(q)} (${q}) reads ${token(k)} (${k}): ${hw.number(weight(q, k), 2)}`, told(edge(q, k))[1]] : [`${token(q)} comes before ${token(k)}`]), node: edge, row: token, column: token });

  // What was done: the metric, the answers, the layers after, each part, and the call.
  const heading = hw.element("h2", { "data-said": "" }), result = hw.element("div", { className: "card" });
  const bars = (answer) => {
    const most = scale(answer.parts.map((part) => part.effect));
    const list = answer.parts.map((part) => {
      const bar = hw.element("span", { ariaHidden: true });
      bar.style.cssText = `display:inline-block;height:9px;margin:0 6px;width:${Math.round((70 * Math.abs(part.effect)) / most)}px;background:${hw.onPaper(part.effect > 0 ? "#b2182b" : "#2166ac")}`;
      const button = hw.element("button", { type: "button" }, part.site === "z" ? `head ${part.head}` : `reads ${token(part.key, answer.how)} (${part.key})`, bar, signed(part.effect));
      button.addEventListener("click", (event) => click({ site: part.site, layer: part.layer, position: part.position, head: part.head, ...(part.key === undefined ? {} : { key: part.key }) }, event.shiftKey));
      return hw.element("div", {}, button);
    });
    return list.length ? [hw.element("h2", {}, answer.parts[0].site === "z" ? "each head there, by itself" : "what it reads, edge by edge"), hw.element("div", { className: "scroll", style: "max-height:220px" }, ...list)] : [];
  };
  const downstream = (answer) => {
    const both = [about(answer.how).layers, answer.layers], all = both.flat().concat(answer.goal), [low, high] = [Math.min(...all), Math.max(...all)];
    const [w, h] = [300, 110], x = (l) => 34 + (l * (w - 44)) / Math.max(1, layers - 1), y = (v) => 8 + ((high - v) * (h - 30)) / Math.max(1e-9, high - low);
    const chart = hw.canvas(w, h, (pen) => {
      pen.clearRect(0, 0, w, h);
      pen.fillStyle = pen.strokeStyle = hw.ink("--faint");
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(hw.number(high, 1), 2, 14); pen.fillText(hw.number(low, 1), 2, h - 20); pen.fillText(`after layer 0 to ${layers - 1}; dashed: before`, 34, h - 4);
      both.forEach((line, i) => {
        pen.setLineDash(i ? [] : [4, 3]);
        pen.strokeStyle = hw.ink(i ? "--accent" : "--faint");
        pen.lineWidth = i ? 2 : 1.5;
        pen.beginPath();
        line.forEach((value, l) => pen.lineTo(x(l), y(value)));
        pen.stroke();
      });
      pen.setLineDash([]);
    }, { tabIndex: -1, role: "img", ariaLabel: `The metric after each layer, edited: ${answer.layers.map((v) => hw.number(v, 2)).join(", ")}` });
    chart.draw();
    return [hw.element("h2", {}, `downstream: ${spec.metric} after each layer (logit lens)`), chart];
  };
  const show = () => {
    const answer = last();
    [cells, byHead, reads, ...colours].forEach((one) => one.draw());
    undoing.disabled = !clicked.length;
    run.textContent = `Edited: the ${about().run} run, ${spec.metric} ${hw.number(about().before)}; the other run has ${hw.number(about().goal)}.`;
    readsName.textContent = `head ${picked[0]}.${picked[1]} in the ${about().run} run: what each token reads`;
    if (!answer) {
      heading.textContent = "Click a cell, a head, or a token that another reads.";
      result.replaceChildren(heading, hw.element("p", { className: "faint" }, live ? "Shift adds to what is changed together." : "This page knows every single node; sets and other edges need a kernel: hw.board(...)."));
      return;
    }
    const effect = answer.after - answer.before, what = answer.nodes.map((n) => said(n, answer.how)).join(" + ");
    heading.textContent = Number.isFinite(effect) ? `${answer.how} ${what}: ${signed(effect)}${share(effect, answer.how)}` : `${what}: not in this page, a kernel would compute it`;
    const top = answer.top.length ? [hw.element("h2", {}, "answers"), hw.table({ columns: ["answer", "before", "after"], rows: answer.top.map(([text, before, after]) => [hw.token(text), hw.number(before, 3), hw.number(after, 3)]) })] : [];
    result.replaceChildren(heading,
      ...(Number.isFinite(effect) ? [hw.element("p", {}, `${spec.metric} ${hw.number(answer.before)} → ${hw.number(answer.after)}${answer.seconds === undefined ? "" : ` in ${hw.number(answer.seconds, 3)} s`}`)] : []),
      ...top, ...(answer.layers.length ? downstream(answer) : []), ...bars(answer),
      ...(answer.code ? [hw.element("h2", {}, "as code"), hw.element("code", { "data-code": "" }, answer.code)] : []));
  };

  const names = Object.keys(spec.hows);
  const undoing = hw.element("button", { type: "button" }, "undo");
  undoing.addEventListener("click", undo);
  const chooseHow = hw.choice("change", names, (i) => { how = names[i]; if (live && !known[how]) ask({ known: how }); show(); });
  chooseHow.querySelector("select").value = names.indexOf(how);
  const chooseSite = hw.choice("cells of", sites, (i) => { site = i; show(); });
  const add = hw.toggle("add to a set", false, (on) => { adding = on; });
  add.classList.add("plain");
  add.hidden = !live;
  const colours = scales().map((_, i) => hw.scale((at) => hw.diverging(2 * at - 1), () => [...[-1, 1].map((sign) => signed(sign * scales()[i])), 0], "Scale of the colours: effects below and above 0"));
  colours.push(hw.scale(hw.sequential, () => ["0", "weight 1", 0], "Scale of the colours: weights from 0 to 1"));
  const [run, readsName] = [hw.element("p", { className: "faint" }), hw.element("h2", {})];
  const numbers = () => ({ columns: ["kind", "layer", "position", "head", "effect"],
    rows: [...sites.flatMap((name, s) => Array.from({ length: layers * T }, (_, i) => [name, Math.floor(i / T), i % T, "–", hw.exact(known[how] ? known[how].cells[s * layers * T + i] : NaN)])),
      ...Array.from({ length: layers * heads }, (_, i) => ["z", Math.floor(i / heads), "–", i % heads, hw.exact(known[how] ? known[how].heads[i] : NaN)])] });
  const part = (title, canvas, colour) => hw.element("div", {}, typeof title === "string" ? hw.element("h2", {}, title) : title, colour, hw.element("div", { className: "scroll" }, canvas));
  show();
  hw.lay(root, spec.title, numbers, [chooseHow, chooseSite, add, undoing, status], run,
    hw.element("div", { className: "sides" }, hw.element("div", { style: "flex:0 1 auto;max-width:100%" }, part("cells: layer (up) by token", cells, colours[0]), part("heads: layer (up) by head, at all tokens", byHead, colours[1]), part(readsName, reads, colours[2])), result));
});
