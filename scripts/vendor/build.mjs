// Writes gateway/unified_gateway/static/vendor anew: `make vendor`. Node is needed for this alone, never by a user.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "..", "gateway", "unified_gateway", "static", "vendor");
const { dependencies } = JSON.parse(readFileSync(join(here, "package.json"), "utf8"));
const { packages: locked } = JSON.parse(readFileSync(join(here, "package-lock.json"), "utf8"));
// what the packages above bring along is bundled too
const names = Object.keys(locked)
  .filter((path) => path && !locked[path].dev)
  .map((path) => path.replace(/^node_modules\//, ""))
  .sort();

mkdirSync(out, { recursive: true });
await build({
  entryPoints: [join(here, "entry.js")],
  outfile: join(out, "vendor.js"),
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none",
  banner: { js: "// Made by `make vendor`. Licences: LICENSES.txt; versions and checksums: vendor.json." },
});
writeFileSync(join(out, "uPlot.css"), readFileSync(join(here, "node_modules/uplot/dist/uPlot.min.css")));

const packages = {};
const licences = [];
for (const name of names) {
  const { version, integrity, license } = locked[`node_modules/${name}`];
  packages[name] = { version, licence: license, integrity };
  if (!integrity) throw new Error(`package-lock.json has no integrity hash of ${name}`);
  const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim();
  licences.push(`${name} ${version} (${license})\n${"=".repeat(72)}\n\n${text}\n`);
}
for (const name of Object.keys(dependencies)) {
  if (!packages[name]) throw new Error(`package-lock.json lacks ${name}`);
}
writeFileSync(join(out, "LICENSES.txt"), licences.join("\n\n"));

const sha256 = {};
for (const name of ["LICENSES.txt", "uPlot.css", "vendor.js"]) {
  sha256[name] = createHash("sha256").update(readFileSync(join(out, name))).digest("hex");
}
writeFileSync(join(out, "vendor.json"), JSON.stringify({ packages, sha256 }, null, 2) + "\n");
