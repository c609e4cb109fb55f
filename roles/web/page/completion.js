// Answers of models: requests to `/v1`, where the seed speaks OpenAI's interface for all verifiers, and their events.

import { Problem, problemOf, request } from "./feed.js";

const LONGEST_PAUSE_S = 30; // between two looks whether a model is loaded

/** What `GET /v1/models` lists. Raises Problem, with status 404 if this seed has no such interface. */
export async function listModels() {
  const { data } = await (await request("/v1/models", { timeoutS: 10 })).json();
  return data.filter(({ id }) => typeof id === "string");
}

/** The events of one answer: `{askedAt}`, `{loading}` while the model loads, `{verifier}` when one begins to write,
 *  then `{text, reason, usage}`. Raises Problem, and AbortError after `signal`. */
export async function* answerOf(body, signal) {
  const answer = yield* whenLoaded({ ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const { headers } = answer;
  const verifier = decodeURIComponent(headers.get("p2ptrain-verifier") ?? "");
  yield { verifier, leftOut: Number(headers.get("p2ptrain-turns-left-out")) };
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(cutOff);
      if (done) cutOff();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.filter((each) => each.startsWith("data:"))) {
        const data = line.slice("data:".length).trim();
        if (data === "[DONE]") return;
        yield read(JSON.parse(data));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

/** The answer's response. A model that a verifier is loading is asked for again. */
async function* whenLoaded(body, signal) {
  for (;;) {
    yield { askedAt: performance.now() };
    try {
      return await request("/v1/chat/completions", { method: "POST", body, signal });
    } catch (problem) {
      if (problem.details?.code !== "model_loading") throw problem;
      yield { loading: { message: problem.message, ...problem.details } };
      await pause(Math.min(Math.max(problem.retryAfterS || 2, 1), LONGEST_PAUSE_S), signal);
    }
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const stop = () => reject(signal.reason);
    signal.addEventListener("abort", stop, { once: true });
    setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, 1000 * seconds);
  });
}

function cutOff(error) {
  if (error?.name === "AbortError") throw error;
  throw new Problem("the connection ended before the answer did", "ask again");
}

function read({ error, choices: [choice] = [], usage }) {
  if (error) throw problemOf(error, "the answer failed");
  return { text: choice?.delta?.content ?? "", reason: choice?.finish_reason, usage };
}
