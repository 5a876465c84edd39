// A page opened from a folder (file:) may not fetch search.json; it may load a script with the same content.
if (location.protocol === "file:") {
  const fetched = window.fetch;
  window.fetch = (address, ...rest) => {
    if (!String(address).endsWith("search.json")) return fetched(address, ...rest);
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = String(address).replace(/search\.json$/, "search-index.js");
      script.onload = () => resolve({ ok: true, json: async () => window.searchIndex });
      script.onerror = reject;
      document.head.append(script);
    });
  };
}

// Search: where a word is in a heading, defined or used a few times comes first, and of those the earlier page; what is only similar comes after that.
document.addEventListener("DOMContentLoaded", () => {
  const Similar = window.Fuse;
  if (!Similar) return;
  const relevance = (entry, word) => {
    const literal = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), whole = new RegExp(`\\b${literal}\\b`, "gi");
    const used = (entry.text.match(whole) || []).length;
    const defined = new RegExp(`\\b(class|def) ${literal}\\b`, "i").test(entry.text);
    const headed = whole.test(entry.section || ""), titled = new RegExp(literal, "i").test(entry.title);
    const part = entry.text.toLowerCase().includes(word.toLowerCase());
    return 40 * headed + 20 * defined + 10 * titled + Math.min(used, 6) + part;
  };
  window.Fuse = class extends Similar {
    constructor(entries, options) {
      super(entries, options);
      this.entries = entries;
    }
    search(query, options = {}) {
      const words = query.split(/\s+/).filter((word) => word);
      const scores = this.entries.map((item) => ({ item, scores: words.map((word) => relevance(item, word)) }));
      const exact = scores.filter((hit) => hit.scores.every((score) => score))
        .sort((a, b) => Math.min(...b.scores) - Math.min(...a.scores));
      const found = new Set(exact.map((hit) => hit.item));
      const similar = super.search(query, options).filter((hit) => !found.has(hit.item));
      return [...exact, ...similar].slice(0, options.limit);
    }
  };
});

// The page's contents at its head where there is no margin for them.
document.addEventListener("DOMContentLoaded", () => {
  const contents = document.querySelector("#TOC"), head = document.querySelector("#title-block-header");
  if (!contents || !head || !contents.querySelector("ul")) return;
  const menu = document.createElement("details");
  menu.className = "page-menu";
  menu.innerHTML = "<summary>On this page</summary>";
  const list = contents.querySelector("ul").cloneNode(true);
  list.querySelectorAll("[id]").forEach((element) => element.removeAttribute("id"));
  list.querySelectorAll("a").forEach((link) => link.addEventListener("click", () => { menu.open = false; }));
  menu.append(list);
  head.after(menu);
});

// Landmarks of the same kind are told apart by their names.
document.addEventListener("DOMContentLoaded", () => {
  const names = {"#quarto-header nav.navbar": "Site", "#quarto-sidebar": "Chapters", ".quarto-secondary-nav": "This chapter",
    ".quarto-secondary-nav nav": "Where this page is", "#TOC": "On this page", "nav.page-navigation": "Next and previous"};
  Object.entries(names).forEach(([place, name]) => document.querySelector(place)?.setAttribute("aria-label", name));
});

// What scrolls can be scrolled from the keyboard.
const reachable = () => document.querySelectorAll("main pre, main mjx-container[display], main .cell-output-display, main .sd-table, main table")
  .forEach((element) => { if (element.scrollWidth > element.clientWidth + 1) element.tabIndex = 0; });
// A formula that is wider than its column is set smaller, down to seven tenths; what is wider still keeps its size and scrolls.
const fitted = () => document.querySelectorAll("main .math.display").forEach((formula) => {
  formula.style.fontSize = "";
  for (let size = 100; size > 70 && formula.scrollWidth > formula.clientWidth + 1;) {
    size = Math.max(70, Math.min(size - 1, size * formula.clientWidth / formula.scrollWidth));
    formula.style.fontSize = `${size}%`;
  }
  if (formula.scrollWidth > formula.clientWidth + 1) formula.style.fontSize = "";
});

window.addEventListener("load", async () => {
  if (window.MathJax?.startup) await MathJax.startup.promise;
  fitted();
  reachable();
  window.addEventListener("resize", () => { fitted(); reachable(); });
});
