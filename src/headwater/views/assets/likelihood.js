// How likely a model finds each token of a text: the text as a strip, coloured by what is chosen; the lowest are framed.
hw.start(async (spec, root) => {
  const { texts, layers } = spec, held = {};
  for (const name of ["log_probability", "entropy", "variance", "top1_log_probability", "rank"]) held[name] = await hw.unpack(spec[name]);
  let [text, layer, score, part] = [0, layers.length - 1, 0, 2];
  const begins = texts.reduce((sums, one) => [...sums, sums[sums.length - 1] + one.tokens.length * layers.length], [0]);
  const value = (name, i) => held[name][begins[text] + layer * texts[text].tokens.length + i];
  const plus = (i) => (value("log_probability", i) + value("entropy", i)) / Math.sqrt(Math.max(value("variance", i), 1e-8));
  // Each score: its name, its value, and where its colours begin and end.
  const scores = [
    ["log p", (i) => value("log_probability", i), 0, -10],
    ["rank", (i) => value("rank", i), 0, 1000],
    ["entropy", (i) => value("entropy", i), 0, 8],
    ["deviation (Min-K%++)", plus, 1, -4],
  ];
  const shareOf = (i) => {
    const [name, of, first, last] = scores[score];
    const share = name === "rank" ? Math.log1p(of(i)) / Math.log1p(last) : (of(i) - first) / (last - first);
    return Math.min(1, Math.max(0, share));
  };
  const parts = [0.05, 0.1, 0.2, 0.3, 0.5];
  // The lowest K % that Min-K% (of deviations: Min-K%++) is the mean of.
  const lowest = () => {
    const of = score === 3 ? plus : (i) => value("log_probability", i), n = texts[text].tokens.length;
    const order = [...Array(n).keys()].sort((a, b) => of(a) - of(b)).slice(0, Math.max(1, Math.floor(parts[part] * n)));
    return { chosen: new Set(n ? order : []), mean: order.reduce((sum, i) => sum + of(i), 0) / order.length };
  };
  const about = (i) => [`${hw.token(texts[text].tokens[i])} (${texts[text].positions[i]}): log p ${hw.number(value("log_probability", i))}`,
    `rank ${value("rank", i)}${value("rank", i) === 0 ? ", the model's first choice" : `; the first choice has log p ${hw.number(value("top1_log_probability", i))}`}`,
    `entropy ${hw.number(value("entropy", i))}`, `deviation ${hw.signed(plus(i), 2)} standard deviations`];
  const card = hw.element("p", { className: "faint", "data-card": "" }), place = hw.element("div", { className: "likely" });
  const scale = hw.canvas(260, 34, (pen) => {
    pen.clearRect(0, 0, 260, 34);
    for (let i = 0; i < 240; i++) { pen.fillStyle = hw.unlikely(i / 240); pen.fillRect(10 + i, 2, 1.5, 12); }
    pen.fillStyle = hw.ink("--faint");
    const [, , first, last] = scores[score];
    pen.textAlign = "left";
    pen.fillText(first, 10, 29);
    pen.textAlign = "right";
    pen.fillText(`${last} and beyond`, 250, 29);
  }, { tabIndex: -1, role: "img", ariaLabel: "Scale of the colours" });
  let strip = null;
  const build = () => {
    strip = hw.strip(texts[text].tokens, (at, event) => {
      hw.tip(at !== null && event ? about(at) : null, event);
      if (at !== null) { card.textContent = about(at).join("; "); if (!event) hw.say(about(at).join(", ")); } else told();
    });
    strip.box.dataset.main = "";
    place.replaceChildren(strip.box);
    if (!texts[text].tokens.length) place.append(hw.element("p", {}, `nothing was scored: ${texts[text].note || "no token"}`));
    shade();
  };
  const shade = () => {
    const { chosen } = lowest(), shares = texts[text].tokens.map((_, i) => shareOf(i));
    strip.shade(shares, hw.unlikely, hw.overUnlikely);
    strip.marks.forEach((one, i) => one.classList.toggle("lowest", chosen.has(i)));
    strip.tell(null);
    scale.draw();
  };
  const told = () => {
    const { chosen, mean } = lowest(), name = score === 3 ? "Min-K%++" : "Min-K%";
    card.textContent = chosen.size ? `Framed: the lowest ${Math.round(100 * parts[part])} % (${chosen.size} of ${texts[text].tokens.length}); their mean, ${name}, is ${hw.signed(mean)}. Hover a token for its numbers; click to keep it.` : "";
  };
  const choices = [];
  if (texts.length > 1) choices.push(hw.choice("text", texts.map((one) => `${one.number}: ${one.begins}`), (i) => { text = i; build(); }));
  if (layers.length > 1) choices.push(hw.choice("layer", layers.map(String), (i) => { layer = i; shade(); }));
  choices.push(hw.choice("colour", scores.map(([name]) => name), (i) => { score = i; shade(); }),
    hw.choice("framed", parts.map((one) => `lowest ${Math.round(100 * one)} %`), (i) => { part = i; shade(); }));
  if (layers.length > 1) choices[choices.length - 3].querySelector("select").value = layer;
  choices[choices.length - 1].querySelector("select").value = part;
  const numbers = () => ({ columns: ["position", "token", "log p", "rank", "entropy", "variance", "first choice's log p"],
    rows: texts[text].tokens.map((token, i) => [texts[text].positions[i], hw.token(token), ...["log_probability", "rank", "entropy", "variance", "top1_log_probability"].map((name) => hw.exact(value(name, i)))]) });
  build();
  hw.lay(root, spec.title, numbers, choices, place, scale, card);
});
