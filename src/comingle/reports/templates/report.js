"use strict";
(() => {
  for (const radio of document.querySelectorAll("input[name=curves]")) {
    radio.addEventListener("change", () => {
      for (const figure of document.querySelectorAll("[data-curves]")) figure.hidden = figure.dataset.curves !== radio.value;
    });
  }

  const source = document.getElementById("token-data");
  if (!source) return;
  const views = JSON.parse(source.textContent);
  const [grid, tip, slider, now, legend, chooser] =
    ["grid", "tip", "layer", "layer-now", "legend", "view"].map((id) => document.getElementById(id));
  let view, cells;

  const add = (parent, name, attributes = {}, text = "") => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return parent.appendChild(element);
  };
  const percent = (value) => `${(value / 10).toFixed(1)}%`;

  // Thousandths as little-endian 16-bit numbers: (layers, tokens, experts).
  const unpack = (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const look = new DataView(bytes.buffer);
    return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => look.getUint16(2 * i, true));
  };
  const at = (cell, layer, token) => {
    const start = (layer * cell.text.tokens.length + token) * cell.user.experts.length;
    return cell.gates.subarray(start, start + cell.user.experts.length);
  };
  const top = (gates) => gates.reduce((best, value, i) => (value > gates[best] ? i : best), 0);
  const visible = (token) => (token === "" ? "\u200b" : token.replaceAll("\n", "\u23ce\n"));

  const build = (number) => {
    view = views[number];
    slider.max = view.layers - 1;
    slider.value = Math.min(slider.value, slider.max);
    grid.replaceChildren();
    const inner = add(grid, "div", { class: "grid" });
    inner.style.gridTemplateColumns = `repeat(${view.users.length}, minmax(16rem, 1fr))`;
    cells = view.texts.flatMap((text, t) => view.users.map((user, u) => makeCell(inner, text, user, view.gates[t][u])));
    const experts = view.users.flatMap((user) => user.experts.map((name, i) => [user.classes[i], name]));
    // "specialist" of one user and "specialist 1" of another have one colour; the longer name tells more.
    const names = new Map(experts.sort((a, b) => a[0].localeCompare(b[0]) || a[1].length - b[1].length));
    legend.replaceChildren();
    for (const [css, name] of names) add(legend, "span", { class: `swatch ${css}` }, name);
    paint();
  };

  const makeCell = (parent, text, user, packed) => {
    const own = text.owner === user.name;
    const box = add(parent, "section", { class: own ? "cell own" : "cell" });
    const title = add(box, "h4", {}, `text: ${text.name} · model: ${user.name} `);
    if (own) add(title, "span", {}, view.inDistribution ? "(in distribution)" : "(own test: a mixture)");
    const share = add(box, "p", { class: "share" });
    const block = add(box, "p", { class: "text", role: "group", "aria-label": `${title.textContent}: tokens` });
    const cell = { text, user, gates: unpack(packed), share, spans: [] };
    text.tokens.forEach((token, i) => {
      const span = add(block, "span", { tabindex: i ? -1 : 0 }, visible(token));
      if (token === "") span.classList.add("part");
      span.token = i;
      cell.spans.push(span);
    });
    for (const kind of ["mouseover", "focusin"]) block.addEventListener(kind, (event) => show(cell, event.target));
    for (const kind of ["mouseleave", "focusout"]) block.addEventListener(kind, hide);
    block.addEventListener("keydown", (event) => move(cell, event));
    return cell;
  };

  const paint = () => {
    const layer = Number(slider.value);
    now.textContent = `${layer} of ${view.layers - 1}`;
    slider.setAttribute("aria-valuetext", `layer ${layer}`);
    for (const cell of cells) {
      const count = cell.user.experts.length, tops = new Array(count).fill(0);
      cell.spans.forEach((span, i) => {
        const gates = at(cell, layer, i), best = top(gates);
        tops[best] += 1;
        span.className = `${cell.user.classes[best]}${cell.text.tokens[i] === "" ? " part" : ""}`;
        const sure = count > 1 ? (gates[best] / 1000 - 1 / count) / (1 - 1 / count) : 1;
        span.style.setProperty("--sure", Math.max(0, sure).toFixed(3));
      });
      cell.share.textContent = cell.user.experts
        .map((name, i) => `${name}: ${tops[i]}`).join(" · ") + ` of ${cell.spans.length} tokens`;
    }
    if (!tip.hidden && tip.shown) show(...tip.shown);
  };

  const show = (cell, span) => {
    if (span.token === undefined) return;
    const gates = at(cell, Number(slider.value), span.token);
    tip.replaceChildren();
    const token = cell.text.tokens[span.token];
    add(tip, "b", {}, token === "" ? "part of a character" : JSON.stringify(token));
    add(tip, "span", {}, ` token ${span.token}, layer ${slider.value}`);
    cell.user.experts.forEach((name, i) => {
      const row = add(tip, "div");
      add(row, "span", {}, name);
      add(row, "i", { class: cell.user.classes[i] }).style.width = percent(gates[i]);
      add(row, "em", {}, percent(gates[i]));
    });
    tip.hidden = false;
    tip.shown = [cell, span];
    for (const old of document.querySelectorAll("[aria-describedby=tip]")) old.removeAttribute("aria-describedby");
    span.setAttribute("aria-describedby", "tip");
    place(span);
  };
  const place = (span) => {
    const token = span.getClientRects()[0], size = tip.getBoundingClientRect();
    const above = token.top - size.height - 8;
    tip.style.left = `${Math.max(8, Math.min(token.left, document.documentElement.clientWidth - size.width - 8))}px`;
    tip.style.top = `${above > 8 ? above : token.bottom + 8}px`;
  };
  // The numbers of the view that is shown, written when they are asked for.
  const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;
  const sheet = () => {
    const rows = [["text", "model", "layer", "token_number", "token", "expert", "probability"]];
    for (const cell of cells) {
      for (let layer = 0; layer < view.layers; layer += 1) {
        cell.text.tokens.forEach((token, i) => at(cell, layer, i).forEach((gate, e) => {
          rows.push([cell.text.name, cell.user.name, layer, i, token, cell.user.experts[e], gate / 1000]);
        }));
      }
    }
    return rows.map((row) => row.map(quoted).join(",") + "\n").join("");
  };
  const download = (event) => {
    event.preventDefault();
    const address = URL.createObjectURL(new Blob([sheet()], { type: "text/csv" }));
    const link = Object.assign(document.createElement("a"), { href: address, download: "tokens.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  };
  document.getElementById("token-csv").addEventListener("click", download);
  const hide = () => { tip.hidden = true; };

  // One tab stop for each cell; within it the arrow keys move from token to token.
  const move = (cell, event) => {
    const from = event.target.token, last = cell.spans.length - 1;
    const to = { ArrowRight: from + 1, ArrowDown: from + 1, ArrowLeft: from - 1, ArrowUp: from - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined || from === undefined) return;
    event.preventDefault();
    const target = cell.spans[Math.max(0, Math.min(last, to))];
    cell.spans[from].tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  };

  views.forEach((one, i) => add(chooser, "option", { value: i }, one.label));
  document.getElementById("view-label").hidden = views.length < 2;
  chooser.addEventListener("change", () => build(Number(chooser.value)));
  slider.addEventListener("input", paint);
  // Moving to a token by keyboard may scroll the page or its cell: the tip goes with the token.
  addEventListener("scroll", () => { if (!tip.hidden) place(tip.shown[1]); }, { passive: true, capture: true });
  build(0);
})();
