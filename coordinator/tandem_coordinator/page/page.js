// Puts the parts that the coordinator sends into their places, and says so when it sends none any more.
"use strict";

const SILENT = 10_000; // ms without a word, beats come every 3 s
const AGAIN = 2_000, AGAIN_LATER = 15_000;
const wide = matchMedia("(min-width: 701px)");
const banner = document.getElementById("banner");

let source = null;
let heard = Date.now(); // when the coordinator said something last
let lost = false;
let over = false; // the job has ended, and this is how
let refused = ""; // why the coordinator does not let us look
let next = 0; // when to try again

function clock(milliseconds) {
  const then = new Date(milliseconds);
  const old = Math.abs(Date.now() - milliseconds) > 20 * 3600 * 1000;
  const time = then.toLocaleTimeString([], {hour12: false});
  return old ? `${then.toLocaleDateString()} ${time}` : time;
}

function put(name, html) {
  const place = document.getElementById(name);
  if (!place) return;
  // Whoever has scrolled a table to the right, or the events down, wants to stay there.
  const scrolled = [...place.querySelectorAll(".scroll, ol")].map((one) => [one.scrollLeft, one.scrollTop]);
  const section = place.closest("section");
  if (section) section.hidden = !html; // a chart that the run has nothing for
  place.innerHTML = html; // escaped where it was made; the page allows no script but this one
  for (const time of place.querySelectorAll("time[data-at]")) {
    time.textContent = clock(1000 * Number(time.dataset.at));
  }
  place.querySelectorAll(".scroll, ol").forEach((one, index) => {
    [one.scrollLeft, one.scrollTop] = scrolled[index] || [0, 0];
  });
  Charts.adopt(place);
  if (name === "head") {
    const job = place.querySelector("h1"), phase = place.querySelector(".result");
    document.title = `${job ? job.textContent : "Tandem"} · ${phase ? phase.textContent : ""}`;
  }
}

function told() {
  heard = Date.now();
  lost = over = false;
  refused = "";
  show();
}

function show() {
  const since = `${clock(heard)} (${Math.round((Date.now() - heard) / 1000)} s ago)`;
  let text = "";
  if (refused) text = `Not connected: ${refused}.`;
  else if (over) text = `The job is over, and this is how it ended. As of ${clock(heard)}.`;
  else if (lost) text = `The coordinator has not answered since ${since}. This page goes on by itself when it is back.`;
  banner.hidden = !text;
  if (banner.textContent !== text) banner.textContent = text;
  banner.className = over ? "over" : "lost";
  document.body.classList.toggle("stale", Boolean(refused) || (lost && !over));
  document.getElementById("heard").textContent = `Last word at ${clock(heard)}.`;
}

function listen() {
  hush();
  source = new EventSource(`stream?look=${wide.matches ? "wide" : "narrow"}`);
  source.addEventListener("parts", (event) => {
    told();
    for (const [name, html] of Object.entries(JSON.parse(event.data).parts)) put(name, html);
  });
  source.addEventListener("beat", told);
  source.addEventListener("end", (event) => {
    heard = Date.now();
    hush();
    over = JSON.parse(event.data).over;
    lost = true;
    next = Date.now() + (over ? AGAIN_LATER : AGAIN);
    show();
  });
  source.onerror = () => lose();
}

function hush() {
  if (source) source.close();
  source = null;
}

function lose() {
  hush();
  lost = true;
  next = Date.now() + (over ? AGAIN_LATER : AGAIN);
  show();
}

async function again() {
  next = Date.now() + AGAIN_LATER;
  try {
    // An EventSource does not say why it is refused.
    const answer = await fetch("ready", {cache: "no-store"});
    if (answer.ok) {
      listen();
      return;
    }
    refused = (await answer.json()).error;
  } catch (error) {
    next = Date.now() + (over ? AGAIN_LATER : AGAIN);
  }
  show();
}

setInterval(() => {
  if (source && Date.now() - heard > SILENT) lose();
  if (!source && Date.now() >= next) again();
  if (lost) show();
}, 1000);
wide.addEventListener("change", listen);
again();
