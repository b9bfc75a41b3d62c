// The figures beside the answer. Those of one request come from its own stream, hits and gamma from the server's last rounds.

import { number, percent } from "./words.js";

const field = (id) => document.getElementById(id);

export class Numbers {
  clear() {
    for (const id of ["rate", "accepted", "first", "hits", "gamma-now"]) field(id).textContent = "–";
  }

  ofAnswer(meter) {
    field("rate").textContent = meter.rate === null ? "–" : number(meter.rate);
    field("accepted").textContent = meter.acceptedPerRound === null ? "–" : meter.acceptedPerRound.toFixed(2);
    field("first").textContent = meter.first === null ? "–" : `${(meter.first * 1000).toFixed(0)} ms`;
  }

  // Rounds that asked for no drafts, such as a race's second half, say nothing of hits.
  ofRounds({ hits, misses, gamma }) {
    if (hits + misses) field("hits").textContent = percent(hits / (hits + misses));
    field("gamma-now").textContent = gamma ?? "–";
  }
}
