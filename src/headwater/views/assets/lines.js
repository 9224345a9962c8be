// Curves and what they are of: the view of a result that is lines against one number.
hw.start(async (spec, root) => {
  const curves = hw.curves(spec);
  hw.lay(root, spec.title, curves.numbers, curves.switches, curves.legend, hw.element("div", { className: "scroll" }, curves.canvas),
    hw.element("p", { className: "faint" }, "Hover a point for its interval; click it, or press Enter, for its line alone, and again for all. A name takes its line out."));
});
