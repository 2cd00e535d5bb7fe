// The decisions about a job: those that the master still has, and then what the stream tells.
import { useEffect, useState } from "../../vendor/vendor.js";
import { call } from "../session.js";

const PAGE = 1000;

/**
 * Return events of a job, oldest first, and the function that asks for older ones.
 * @param {string} jobId @param {import("../mirror.js").Mirror} mirror @param {string} [worker] full name, for those about it alone
 */
export function useHistory(jobId, mirror, worker = "") {
  const [asked, setAsked] = useState({ events: [], isAll: false, error: "" });
  const ask = async (before, known) => {
    const query = new URLSearchParams({ limit: String(PAGE), ...(before != null && { before: String(before) }), ...(worker && { worker }) });
    try {
      const { events } = await call(`/jobs/${encodeURIComponent(jobId)}/explain?${query}`);
      setAsked({ events: [...events, ...known], isAll: events.length < PAGE, error: "" });
    } catch (error) {
      setAsked({ events: known, isAll: true, error: error.message });
    }
  };
  useEffect(() => {
    ask(null, []);
  }, [jobId, worker]);
  const last = asked.events.at(-1)?.sequence ?? -1;
  const newer = mirror.events.filter((event) => event.sequence > last && (!worker || event.worker === worker));
  const events = newer.length ? [...asked.events, ...newer] : asked.events;
  return { events, error: asked.error, isAll: asked.isAll, askOlder: () => ask(asked.events[0]?.sequence, asked.events) };
}
