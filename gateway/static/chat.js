// One streamed answer: sends the request, takes the chunks, keeps the time. Knows no page.

/** What is known of an answer so far. Times are in seconds. */
export class Answer {
  text = "";
  thought = "";
  chunks = 0;
  firstToken = null; // from sending to the first text
  lastToken = null;
  total = null;
  usage = null;
  finish = null;
  error = null;
  stopped = false;

  /** Tokens a second between the first and the last; null for fewer than two. */
  get speed() {
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const time = this.lastToken - this.firstToken;
    return tokens > 1 && time > 0 ? (tokens - 1) / time : null;
  }
}

/** Runs `body` (a streamed chat completion) to its end, calling `news(answer)` after every chunk. Never throws: see
 * `error` and `stopped`. */
export async function stream(api, body, signal, news) {
  const answer = new Answer();
  const began = performance.now();
  const now = () => (performance.now() - began) / 1000;
  try {
    for await (const data of api.events("/v1/chat/completions", { method: "POST", body, signal })) {
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), chunk.error);
      take(answer, chunk, now());
      news(answer);
    }
  } catch (error) {
    if (signal.aborted) answer.stopped = true;
    else answer.error = error;
  }
  answer.total = now();
  news(answer);
  return answer;
}

function take(answer, chunk, at) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content: thought } = choice.delta;
  if (content || thought) {
    answer.firstToken ??= at;
    answer.lastToken = at;
    answer.chunks += 1;
    answer.text += content ?? "";
    answer.thought += thought ?? "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}
