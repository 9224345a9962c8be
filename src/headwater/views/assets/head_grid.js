"use strict";
// One head map on a plane: a mark per head. What is filtered and coloured is in `state`, which all maps of a page
// share: { shown, only, colour, rings }, and what a plane reads of it.
hw.headGrid = async (map, { relations, labels, quiet }, state, { point, keep }) => {
  const [scores, expected, q, flags, label] = await Promise.all([map.score, map.expected, map.q, map.flags, map.label].map(hw.unpack));
  const use = map.use && (await hw.unpack(map.use)), loss = map.loss && (await hw.unpack(map.loss));
  const { layers, heads } = map, known = relations.length, count = layers * heads;
  const [IMPLEMENTED, SUPPRESSED, COPYING] = [1, 2, 4], USED = 2; // use: 0 not measured, 1 not used, 2 used
  const over = (score, habit) => (Number.isFinite(habit) ? (score - habit) / (1 - habit) : NaN);
  const excess = (at) => over(scores[at], expected[at]);
  const isJudged = expected.some(Number.isFinite); // else there is no null model, and the score is all there is
  const strength = (at) => (Number.isFinite(excess(at)) ? excess(at) : isJudged ? scores[at] - 1 : scores[at]);
  // Relations by strength, of the heads that are looked at alone; of all heads the largest strength.
  const best = (number) => {
    const order = [...Array(known).keys()].filter((r) => Number.isFinite(scores[number * known + r]));
    return order.sort((a, b) => strength(number * known + b) - strength(number * known + a));
  };
  const strongest = Float32Array.from({ length: count }, (_, number) => {
    let most = 0;
    for (let at = number * known; at < (number + 1) * known; at++) if (strength(at) > most) most = strength(at);
    return Math.min(1, most);
  });
  const suppressed = new Map();
  for (const [layer, head, ...row] of map.suppressed) {
    const number = layer * heads + head;
    suppressed.set(number, [...(suppressed.get(number) || []), row]);
  }
  const grid = { name: map.name, layers, heads, isUsed: use !== null };
  const has = ([layer, head]) => layer < layers && head < heads;
  const numberOf = (at) => (at && has(at) ? at[0] * heads + at[1] : null);
  grid.called = (number, r) => (flags[number * known + r] & (IMPLEMENTED | SUPPRESSED | COPYING)) !== 0;
  grid.isShown = (number) => state.shown[label[number]] && (state.only < 0 || grid.called(number, state.only));
  const uses = (number, r) => use[number * known + r] === USED;
  grid.used = (number) => use !== null && (state.only < 0 ? relations.some((_, r) => uses(number, r)) : uses(number, state.only));
  grid.usedCount = () => [...Array(count).keys()].filter(grid.used).length;
  grid.shownCount = () => [...Array(count).keys()].filter(grid.isShown).length;

  const headOf = (number) => [Math.floor(number / heads), number % heads];
  const named = (number) => `Head ${headOf(number).join(".")}`;
  const paint = (pen, { cell, middle }) => {
    for (let number = 0; number < count; number++) {
      if (!grid.isShown(number)) continue;
      const [x, y] = middle(...headOf(number)), { name, color, shape } = labels[label[number]];
      if (state.colour < 0) {
        pen.fillStyle = hw.labelColor(name === quiet, color);
        hw.mark(pen, shape, x, y, cell * (name === quiet ? 0.2 : 0.42 * Math.sqrt(0.3 + 0.7 * strongest[number])));
      } else {
        const value = strength(number * known + state.colour);
        pen.fillStyle = Number.isFinite(value) ? hw.sequential(0.08 + 0.92 * Math.max(0, value)) : "transparent";
        pen.fillRect(x - 0.46 * cell, y - 0.46 * cell, 0.92 * cell, 0.92 * cell);
      }
      if (state.rings && grid.used(number)) hw.ring(pen, x, y, 0.48 * cell);
    }
  };

  const usesOf = (number, r) => use ? ["", " (use not shown)", " (used)"][use[number * known + r]] : "";
  // What is known of a head and a relation, as a row of its card: what it does, and the numbers.
  const says = (number, r) => {
    const flag = flags[number * known + r], uses = usesOf(number, r);
    return flag & IMPLEMENTED ? `implements${uses}` : flag & COPYING && !(suppressed.get(number) || []).some(([of]) => of === r) ? "copies" : "";
  };
  const read = { number: hw.number, q: hw.small }, kept = { number: hw.exact, q: hw.exact }; // to be read; to be kept
  const row = (number, r, as) => {
    const at = number * known + r, said = [scores[at], expected[at], excess(at)].map((one) => as.number(one));
    return [relations[r], says(number, r), ...said, as.q(q[at]), ...(loss ? [as.number(loss[at])] : [])];
  };
  const against = (number, as) => (suppressed.get(number) || []).map(([r, score, habit, q]) =>
    [relations[r], flags[number * known + r] & SUPPRESSED ? `suppresses${usesOf(number, r)}` : "copies", ...[score, habit, over(score, habit)].map((one) => as.number(one)), as.q(q), ...(loss ? [as.number(loss[number * known + r])] : [])]);
  grid.columns = ["relation", "says", "score", "expected", "excess", "q", ...(loss ? ["loss"] : [])];
  grid.rows = (number, as = read) => [...against(number, as), ...best(number).map((r) => row(number, r, as))];
  grid.exact = (number) => grid.rows(number, kept);
  const sentence = ([relation, does, score, habit, over, q]) => `${relation}${does ? ` (${does.replace(" (", ", ").replace(")", "")})` : ""}: ${score}${over === "–" ? "" : `, by habit ${habit}, excess ${over}`}${q === "–" ? "" : `, q ${q}`}`;
  grid.title = (at) => { const number = numberOf(at); return number === null ? null : `${named(number)}: ${labels[label[number]].name}`; };
  grid.brief = (at) => { const number = numberOf(at); return [grid.title(at), ...grid.rows(number).slice(0, 4).map(sentence)]; };
  grid.labelOf = (number) => labels[label[number]].name;
  grid.written = ([layer, head]) => (map.writes ? map.writes[`${layer}.${head}`] || null : null);

  const isShown = (at) => grid.isShown(numberOf(at));
  grid.canvas = hw.headPlane({ layers, heads, label: `Heads of ${map.name}` }, state, { paint, isShown, point: (at, event) => point(grid, at, event), keep });
  return grid;
};

// Heads that are called nothing stay in the background, on dark paper too.
hw.labelColor = (isQuiet, color) => (isQuiet && hw.isDark() ? "#65656a" : hw.onPaper(color));
