// Puts the page together: what the buttons do, and in which order.

import { Conversation } from "./conversation.js";
import { History } from "./history.js";
import { Inspector } from "./inspector.js";
import { Key } from "./key.js";
import { Lanes } from "./lanes.js";
import { Models } from "./models.js";
import { Numbers } from "./numbers.js";
import { Origins } from "./origins.js";
import { Panel } from "./panel.js";
import { blame, mode, question, raceOrder, withoutSpeculation } from "./question.js";
import { LANES, race, verdict } from "./race.js";
import { Server } from "./server.js";
import { sumOf } from "./trace.js";
import { Watch } from "./watch.js";
import { number, pause } from "./words.js";

const part = (id) => document.getElementById(id);
const [form, prompt, go, stop, racing, clear] = ["ask", "prompt", "go", "stop", "race", "clear"].map(part);
const key = new Key(() => {
  say(null);
  greet();
});
const server = new Server(key);
const numbers = new Numbers(), origins = new Origins(part("origins")), lanes = new Lanes();
const models = new Models(() => history.clear());
const watch = new Watch(server, models, {
  show: (scene) => {
    lanes.show(scene);
    numbers.ofRounds(sumOf(scene));
  },
  say: (words) => lanes.say(words),
});
const history = new History(server, models);
const conversation = new Conversation(part("chat"));
const drafts = { completion: prompt.value, chat: "Why is the sky blue?" }; // what stands in the box, in either mode
let running = null, isModeChosen = false;

// Finds out what is served, and waits until it is ready.
async function greet() {
  try {
    models.offer(await server.models());
    if (models.talks && !isModeChosen) startWithChat();
    for (let why; (why = await server.unready()) !== null; await pause(2)) setText("state", why);
    setText("state", "Ready");
    part("state").classList.add("ready");
    history.follow();
  } catch (refusal) {
    setText("state", refusal.message);
    if (refusal.status === 401) {
      key.ask(refusal.message);
      return;
    }
    await pause(3);
    await greet();
  }
}

async function ask({ isRace }) {
  if (running || !form.reportValidity()) return;
  const chat = mode() === "chat", said = prompt.value;
  const asked = read(chat, said);
  if (!asked) return;
  const turn = chat ? conversation.turn(said) : null;
  const panels = panelsOf(asked, { isRace, before: chat ? "" : said });
  (turn?.answers ?? part("panels")).replaceChildren(...panels.map((panel) => panel.element));
  if (chat) prompt.value = "";
  begin(panels.length);
  try {
    await race(panels, { beside: raceOrder() === "beside", write: (panel) => write(panel, running.signal) });
    setText("outcome", isRace ? verdict(panels) : summary(panels[0]));
  } catch (error) {
    broke(error, panels);
  }
  if (turn && panels[0].text) turn.keep(panels[0].text);
  else if (turn) {
    turn.drop();
    prompt.value = said;
  }
  end();
}

function read(chat, said) {
  say(null);
  try {
    return question(models.chosen, chat ? conversation.with(said) : null);
  } catch (error) {
    say(`The JSON schema is not JSON: ${error.message}.`, "response_format");
    return null;
  }
}

function panelsOf(asked, { isRace, before }) {
  const all = isRace ? [asked, withoutSpeculation(asked)] : [asked];
  return all.map((one, i) => {
    const title = isRace ? LANES[i] : "Answer";
    return Object.assign(new Panel({ title, alone: !isRace, before, expected: one.body.max_tokens, changed: show }), { asked: one, leads: i === 0 });
  });
}

async function write(panel, signal) {
  panel.begin();
  try {
    for await (const chunk of server.stream(panel.asked.path, panel.asked.body, signal)) panel.take(chunk);
  } catch (error) {
    const count = panel.meter.tokens, how = error.name === "AbortError" ? "Stopped" : "Broke off";
    panel.end(count ? `${how} after ${count} tokens.` : "No answer.");
    throw error;
  }
  panel.end();
}

// The figures are those of the lane that speculates.
function show(panel) {
  if (!panel.leads) return;
  numbers.ofAnswer(panel.meter);
  origins.show(panel.meter.counts);
}

function summary({ meter }) {
  return meter.rate === null ? `Done: ${meter.tokens} tokens.` : `Done: ${meter.tokens} tokens, ${number(meter.rate)} a second.`;
}

function broke(error, panels) {
  if (error.name === "AbortError") {
    setText("outcome", `Stopped after ${panels.reduce((all, panel) => all + panel.meter.tokens, 0)} tokens.`);
    return;
  }
  running.abort(); // the other lane too
  setText("outcome", "");
  say(error.message, error.param);
  if (error.status === 401) key.ask(error.message);
}

function begin(num) {
  running = new AbortController();
  part("empty").hidden = true;
  setText("outcome", num > 1 ? "Racing." : "Writing.");
  numbers.clear();
  switchButtons(true);
  watch.begin();
}

function end() {
  running = null;
  switchButtons(false);
  watch.end();
}

// A button that goes away hands its focus to the one that comes.
function switchButtons(busy) {
  const [from, to] = busy ? [[go, racing], stop] : [[stop], go];
  const moves = from.includes(document.activeElement);
  stop.disabled = !busy;
  go.disabled = racing.disabled = clear.disabled = models.disabled = busy;
  for (const radio of form.elements.mode) radio.disabled = busy;
  if (moves) to.focus();
}

// A model that has a template for chats is met in one.
function startWithChat() {
  isModeChosen = true;
  form.elements.mode.value = "chat";
  changeMode();
}

function changeMode() {
  const chat = mode() === "chat";
  drafts[chat ? "completion" : "chat"] = prompt.value;
  prompt.value = drafts[mode()];
  setText("prompt-label", chat ? "Message" : "Text to continue");
  setText("answers-title", chat ? "Conversation" : "Answer");
  setText("go", chat ? "Send" : "Continue");
  part("panels").hidden = chat;
  part("chat").hidden = clear.hidden = part("system-field").hidden = !chat;
  part("empty").hidden = chat ? conversation.length > 0 : part("panels").childElementCount > 0;
}

// What has not changed is not said again to who listens.
function setText(id, words) {
  if (part(id).textContent !== words) part(id).textContent = words;
}

// An error, or null for none.
function say(words, param = null) {
  part("error").hidden = !words;
  setText("error", words ?? "");
  blame(param);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask({ isRace: false });
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target === prompt) ask({ isRace: false });
});
racing.addEventListener("click", () => ask({ isRace: true }));
stop.addEventListener("click", () => running?.abort());
clear.addEventListener("click", () => {
  conversation.clear();
  setText("outcome", "A new chat.");
  changeMode();
});
for (const radio of form.elements.mode) {
  radio.addEventListener("change", () => {
    isModeChosen = true;
    changeMode();
  });
}
new Inspector(part("answers"));
if (matchMedia("(max-width: 60rem)").matches) part("settings").open = false;
greet();
