// The last rounds of a trace in Chrome's format, as a scene of two lanes. Knows no page. Times are milliseconds from the scene's beginning.

const GAP = 4; // rounds that lie further apart than so many of them are not shown together

// null if no round has decoded.
export function sceneOf(trace, count) {
  const lanes = new Map(trace.traceEvents.filter((event) => event.ph === "M").map((event) => [event.tid, event.args.name]));
  const bars = trace.traceEvents.filter((event) => event.ph === "X").map((event) => barOf(event, lanes.get(event.tid)));
  const rounds = connected(bars.filter((bar) => bar.name === "round" && !bar.about.prompt_tokens)).slice(-count);
  if (!rounds.length) return null;
  const begun = rounds[0].begun, ended = rounds.at(-1).ended;
  const lane = (name) => bars.filter((bar) => bar.lane === name && bar.ended > begun && bar.begun < ended).map((bar) => shifted(bar, begun));
  const shown = rounds.map((round) => shifted(round, begun));
  return { rounds: shown, target: lane("target").map((bar) => ({ ...bar, round: around(bar, shown) })), draft: lane("draft"), length: ended - begun };
}

// What the scene says in numbers.
export function sumOf({ rounds, target, length }) {
  const sum = (name) => rounds.reduce((all, round) => all + round.about[name], 0);
  const durations = rounds.map((round) => round.ended - round.begun).sort((a, b) => a - b);
  return {
    rounds: rounds.length,
    committed: sum("committed"),
    sequences: Math.max(...rounds.map((round) => round.about.sequences)),
    hits: sum("hits"),
    misses: sum("misses"),
    median: durations[Math.floor(durations.length / 2)],
    busy: target.reduce((all, bar) => all + Math.min(bar.ended, length) - Math.max(bar.begun, 0), 0) / length,
    gamma: rounds.at(-1).about.pacer?.gamma ?? null,
  };
}

function barOf(event, lane) {
  return { name: event.name, lane, begun: event.ts / 1000, ended: (event.ts + event.dur) / 1000, about: event.args };
}

function shifted(bar, begun) {
  return { ...bar, begun: bar.begun - begun, ended: bar.ended - begun };
}

// Those at the end that follow one another without a long pause.
function connected(rounds) {
  const durations = rounds.map((round) => round.ended - round.begun).sort((a, b) => a - b);
  const longest = GAP * (durations[Math.floor(durations.length / 2)] ?? 0);
  let first = rounds.length - 1;
  while (first > 0 && rounds[first].begun - rounds[first - 1].ended < longest) first -= 1;
  return rounds.slice(Math.max(first, 0));
}

function around(bar, rounds) {
  const middle = (bar.begun + bar.ended) / 2;
  return rounds.find((round) => round.begun <= middle && middle <= round.ended) ?? null;
}
