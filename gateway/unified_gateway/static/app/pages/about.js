// Releases, the key's fingerprint, licences, and the way out; and the page for who has no session.
import { useEffect, useState } from "../../vendor/vendor.js";
import { duration } from "../format.js";
import { call, session, signIn, signInError, signOut } from "../session.js";
import { html } from "../text.js";
import { Card, Command, Facts, Failed } from "../parts/bits.js";

export function About() {
  const [told, setTold] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    call("/about").then(setTold, (failure) => setError(failure.message));
  }, []);
  return html`<div class="page-head"><h1>About</h1><button type="button" onClick=${signOut}>Sign out</button></div>
    ${error && html`<${Failed} error=${error} />`}
    ${told && html`<${Card} title="This gateway"><${Facts} rows=${[
      ["release", told.release], ["Python", told.python], ["protocol", told.protocol], ["master", told.master], ["cluster key", told.key],
      ["gateway up for", told.uptime_s == null ? "" : duration(told.uptime_s)], ["this session", session.value.write ? "may read and write" : "may read"],
    ]} /><//>
    <${Card} title="Keys of the keyboard"><${Facts} rows=${[["tables", "arrows, page up and down, home, end; Enter opens"], ["grids", "arrows; Enter opens"], ["timeline", "plus and minus zoom, left and right move, 0 shows all"]]} /><//>
    <${Card} title="Licences"><pre class="licences" tabindex="0" aria-label="licences">${told.licences}</pre><//>`}`;
}

export const SignIn = () => html`<main id="content" class="sign-in" tabindex="-1">
  <h1>Unified</h1>
  ${signInError.value && html`<${Failed} error=${signInError.value} />`}
  <p>This page needs a session. On a host that has the cluster's key, run</p>
  <${Command} text="unified ui" />
  <p>and open the URL that it prints. It works once, within five minutes; the session then holds for twelve hours.</p>
  <p class="muted">Only to look: <code>unified ui --read-only</code></p>
  <form class="tools" onSubmit=${(event) => { event.preventDefault(); signIn(event.currentTarget.elements.token.value); }}>
    <label class="select" for="token">or a token of this gateway</label><input id="token" name="token" type="password" class="search" autocomplete="current-password" required /><button type="submit" class="main">Sign in</button>
  </form></main>`;
