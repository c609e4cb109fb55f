// Keeps the page's own files, so that it opens without a connection. It never touches the API: no data, no keys.

const CACHE = "page";
const ANSWER_MS = 3000; // a seed that answers later is taken for one that is away

const NAMES = `theme.js style.css app.js charts.js chat.js completion.js conversations.js docs.html docs.js dom.js feed.js
  format.js markdown.js messages.js panels.js ring.js store.js icon.svg icon.png manifest.webmanifest
  markdown-it/markdown-it.umd.min.js uplot/uPlot.iife.min.js uplot/uPlot.min.css`;
const SHELL = ["/", ...NAMES.split(/\s+/)].map((path) => new URL(path, location.href).href);

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(SHELL)));
});

self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  url.search = url.hash = "";
  if (event.request.method === "GET" && SHELL.includes(url.href)) event.respondWith(fresh(event, url.href));
});

/** The seed's file, or the kept one if the seed does not answer. */
async function fresh(event, address) {
  const cache = await caches.open(CACHE);
  const asked = fetch(event.request).then((answer) => {
    const kept = answer.ok ? cache.put(address, answer.clone()) : null;
    return [answer, kept];
  });
  event.waitUntil(asked.then(([, kept]) => kept).catch(() => {}));
  const late = new Promise((resolve) => setTimeout(resolve, ANSWER_MS, []));
  const [answer] = await Promise.race([asked, late]).catch(() => []);
  return answer ?? (await cache.match(address)) ?? (await asked)[0];
}
