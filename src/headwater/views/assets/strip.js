"use strict";
// A text as its tokens: one can be pointed at, kept by a click, walked to with the arrow keys. `act(at, event)` gets
// which token it is about, or null.
hw.strip = (tokens, act, label = "Tokens") => {
  const box = hw.element("div", { className: "tokens", role: "listbox", ariaLabel: label });
  const strip = { box, locked: null };
  const tell = (i, event = null) => {
    const at = strip.locked === null ? i : strip.locked;
    strip.marks.forEach((one, k) => {
      one.style.borderBottomColor = k === at ? hw.ink("--accent") : "transparent";
      one.classList.toggle("locked", k === strip.locked);
      one.setAttribute("aria-selected", k === strip.locked);
    });
    act(at, event);
  };
  const keep = (i) => { strip.locked = strip.locked === i ? null : i; tell(i); };
  strip.tell = tell;
  strip.marks = tokens.map((token, i) => {
    const made = hw.element("span", { className: "token", tabIndex: i ? -1 : 0, role: "option" }, hw.token(token));
    made.dir = "auto";
    made.addEventListener("pointermove", (event) => { if (strip.locked === null) tell(i, event); });
    made.addEventListener("click", () => keep(i));
    made.addEventListener("focus", () => { if (strip.locked === null) tell(i); });
    return made;
  });
  box.append(...strip.marks);
  box.addEventListener("pointerleave", () => { if (strip.locked === null) tell(null); });
  box.addEventListener("keydown", (event) => {
    const at = strip.marks.indexOf(document.activeElement), next = at + { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Enter" && at >= 0) keep(at);
    else if (event.key === "Escape") { strip.locked = null; tell(null); }
    else if (strip.marks[next]) { strip.marks[at].tabIndex = -1; strip.marks[next].tabIndex = 0; strip.marks[next].focus(); }
    else return;
    event.preventDefault();
  });
  // Shade every token by a share from 0 to 1 on a ramp, or not at all.
  strip.shade = (shares, ramp, over) => strip.marks.forEach((one, i) => {
    const share = shares ? shares[i] : NaN;
    one.style.background = Number.isFinite(share) ? ramp(share) : "";
    one.style.color = Number.isFinite(share) ? over(share) : "";
  });
  return strip;
};
