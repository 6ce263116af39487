// Requests to the server of `trimtab watch`, and its stream of events. The token is that of the page's own address, and goes into
// a header: a cookie would be sent to every other server on this machine too.

const FIRST_PAUSE = 500; // milliseconds until the stream is opened again, twice as long each time
const LONGEST_PAUSE = 5000;

const token = new URLSearchParams(location.search).get("token") || "";

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

let serverTime = 0; // milliseconds of CPU time that the answers so far have taken

async function askJson(path) {
  const answer = await ask(path);
  serverTime += Number(answer.headers.get("x-cpu-milliseconds") || 0);
  return answer.json();
}

const sleep = (milliseconds) => new Promise((done) => { setTimeout(done, milliseconds); });

// Call `on.growth` with everything new, and `on.connected` when the stream opens or breaks; return when the server says that it
// ends. `positions()` is how far the page is, from which a stream that broke goes on.
async function followEvents(positions, on) {
  let pause = FIRST_PAUSE;
  for (;;) {
    try {
      const answer = await ask(`events?known=${encodeURIComponent(JSON.stringify(positions()))}`);
      on.connected(true);
      pause = FIRST_PAUSE;
      if (await readEvents(answer.body.pipeThrough(new TextDecoderStream()), on)) return;
    } catch {
      // The server is gone, or the network between: tried again below.
    }
    on.connected(false);
    await sleep(pause);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

async function readEvents(stream, on) {
  let text = "";
  for await (const part of stream) {
    text += part;
    const events = text.split("\n\n");
    text = events.pop();
    for (const lines of events) {
      const [first, second] = lines.split("\n");
      if (first === "event: end") return true;
      if (first === "event: growth") await on.growth(JSON.parse(second.slice("data: ".length)));
    }
  }
  return false;
}
