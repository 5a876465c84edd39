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
