// Trades the invitation for a cookie, and takes it out of the address bar and the history first.
"use strict";

const word = location.hash.slice(1);
history.replaceState(null, "", "/open");

function say(text) {
  document.getElementById("said").textContent = text;
  document.getElementById("how").hidden = false;
}

async function trade() {
  if (!word) {
    say("Nobody was invited here.");
    return;
  }
  try {
    const answer = await fetch("/open", {
      method: "POST",
      headers: {"Content-Type": "application/json"},
      body: JSON.stringify({word: decodeURIComponent(word)}),
    });
    if (answer.ok) {
      location.replace((await answer.json()).page);
    } else {
      say(`Not opened: ${(await answer.json()).error}.`);
    }
  } catch (error) {
    say(`The coordinator does not answer (${error.message}).`);
  }
}

trade();
