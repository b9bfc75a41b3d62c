// The same question with speculation and without it: who is faster, in one sentence.

import { number } from "./words.js";

export const LANES = ["With speculation", "Without speculation"];

// `write` runs one lane. In turn, each has the devices to itself. The first failure ends both.
export async function race(lanes, { beside, write }) {
  if (!beside) {
    for (const lane of lanes) await write(lane);
    return;
  }
  await Promise.all(lanes.map(write));
}

export function verdict([fast, plain]) {
  const [ours, theirs] = [fast.meter.rate, plain.meter.rate];
  const same = fast.text === plain.text ? "The texts are the same." : "The texts differ, being two draws of the same distribution; with a seed, or at temperature 0, they would be the same.";
  const honest = fast.meter.stats?.lossless === false ? "The faster one is lossy." : same;
  if (ours === null || theirs === null) return `Too short to tell who is faster. ${honest}`;
  const factor = ours / theirs;
  const who = factor >= 1 ? `${factor.toFixed(2)} times as fast with speculation` : `Slower with speculation, ${factor.toFixed(2)} times as fast`;
  return `${who}: ${number(ours)} tokens a second against ${number(theirs)}. ${honest}`;
}
