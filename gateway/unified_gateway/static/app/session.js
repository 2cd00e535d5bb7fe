// The session, and calls of the gateway's JSON API.
import { signal } from "../vendor/vendor.js";

/** `undefined`: not asked yet; `null`: there is none; else `{write, release, master}`. */
export const session = signal(undefined);
export const signInError = signal("");

/**
 * Call the API and return its answer. Throws an Error with the gateway's sentence.
 * @param {string} path below /page @param {{method?: string, body?: any}} options
 */
export async function call(path, { method = "GET", body } = {}) {
  const headers = { "X-Unified": "1", ...(body && { "Content-Type": "application/json" }) };
  let response;
  try {
    response = await fetch(`/page${path}`, { method, headers, body: body && JSON.stringify(body), signal: AbortSignal.timeout(30000) });
  } catch (error) {
    const reason = error.name === "TimeoutError" ? "does not answer" : "cannot be reached";
    throw new Error(`the gateway ${reason}`);
  }
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  if (response.status === 401) session.value = null;
  throw new Error(answer.error ?? `the gateway answered ${response.status}`);
}

/** Exchange the ticket in the URL, if there is one, and find out who we are. */
export async function beginSession() {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
  if (ticket) history.replaceState(null, "", location.pathname + location.search);
  try {
    session.value = ticket ? await call("/session", { method: "POST", body: { ticket } }) : await quietSession();
  } catch (error) {
    session.value = await quietSession().catch(() => null); // an older session may be good still
    signInError.value = error.message;
  }
}

/** @param {string} token of the gateway */
export async function signIn(token) {
  try {
    session.value = await call("/session", { method: "POST", body: { ticket: token } });
    signInError.value = "";
  } catch (error) {
    signInError.value = error.message;
  }
}

async function quietSession() {
  const response = await fetch("/page/session", { headers: { "X-Unified": "1" } });
  return response.ok ? response.json() : null;
}

export async function signOut() {
  await call("/session", { method: "DELETE" });
  session.value = null;
}
