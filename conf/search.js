// Ranks what Sphinx's search has found, by the answers that search.py has put into the index.
// Sphinx writes this file into language_data.js, which the search page loads after searchtools.js.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  // Prose comes before the reference, unless the query is a name as only code has it.
  score: ([docname, title, anchor, , score, , kind]) => {
    const query = (new URLSearchParams(location.search).get("q") ?? "").trim();
    if (kind === "object") {
      const isName = /\w[_.]\w|[a-z][A-Z]/.test(query) && title.endsWith(query);
      return score + (isName ? 1e6 : 0);
    }
    if (docname.startsWith("generated/")) return score;
    const index = Search._index, stemmer = new Stemmer();
    const file = index.docnames.indexOf(docname);
    const words = new Set(splitQuery(query.toLowerCase()).map((word) => stemmer.stemWord(word)));
    let weight = 0;
    for (const word of words) {
      const pages = Object.hasOwn(index.answers ?? {}, word) ? index.answers[word] : [];
      if (pages.includes(file)) weight += 1 / pages.length;
    }
    // A page comes before its sections and its entries in the general index.
    return 1000 + 100 * weight + (anchor ? 0 : 5) + score / 100;
  },
};

// The lines under a result are prose: a page's code, output and tables are left out of them.
Search.htmlToText = ((plain) => (html, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const code = ".highlight, table, details, svg, .sphx-glr-footer, .sphx-glr-download-link-note";
  for (const node of page.querySelectorAll(code)) node.remove();
  return plain(page.documentElement.outerHTML, anchor);
})(Search.htmlToText);
