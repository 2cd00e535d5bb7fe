// What the coordinator holds for a job: datasets, barriers, checkpoints. The page Datasets has the same for all.
import { html } from "../text.js";
import { Data } from "./datasets.js";

export const JobData = ({ job }) => html`<${Data} space=${job.job_id} />`;
