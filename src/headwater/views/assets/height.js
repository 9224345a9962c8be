// Tell the document around the page how high the page is, whenever that changes.
if (parent !== window) {
  const tell = () => parent.postMessage({ headwater: document.documentElement.getBoundingClientRect().height }, "*");
  new ResizeObserver(tell).observe(document.body);
}
