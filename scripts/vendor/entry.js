// All that the page takes from others, in one file: `import { signal, uPlot } from "../vendor/vendor.js"`.
export { h, render, Fragment } from "preact";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "@preact/signals";
export { default as htm } from "htm";
export { default as uPlot } from "uplot";
