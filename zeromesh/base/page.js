const tip = document.getElementById("tip");
function say(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const x = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4);
  const y = event.clientY + 16 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : event.clientY + 16;
  tip.style.left = Math.max(4, x) + "px";
  tip.style.top = y + "px";
}
function values(area, event) {
  const data = area.data ??= JSON.parse(area.dataset.curves);
  const box = area.getBoundingClientRect();
  const place = data.left + (event.clientX - box.left) / box.width * (data.right - data.left);
  const nearest = points => points.reduce((a, b) => Math.abs(b[0] - place) < Math.abs(a[0] - place) ? b : a);
  const curves = data.curves.filter(([, points]) => points.length);
  if (!curves.length) return "";
  const found = curves.map(([name, points]) => [name, nearest(points)]);
  const at = nearest(found.map(([, point]) => point))[0];
  const line = area.querySelector("hr");
  line.hidden = false;
  line.style.left = (at - data.left) / ((data.right - data.left) || 1) * box.width + "px";
  const said = found.map(([name, [x, value]]) =>
    (name ? name + ": " : "") + value + (data.unit ? " " + data.unit : "") + (x === at ? "" : " (" + x + ")"));
  return [data.labels.length ? data.labels[at] : data.across + " " + at, ...said].join("\n");
}
for (const kind of ["pointermove", "pointerdown"]) addEventListener(kind, event => {
  const area = event.target.closest?.("[data-curves]"), spot = event.target.closest?.("[data-tip]");
  for (const line of document.querySelectorAll(".area hr")) line.hidden = true;
  const text = area ? values(area, event) : spot ? spot.dataset.tip : "";
  if (text) say(text, event); else tip.hidden = true;
});
