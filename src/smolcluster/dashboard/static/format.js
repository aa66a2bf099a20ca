// Numbers as people read them. Unknown is a dash, never a zero.

const DASH = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

function threeDigits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

/** 950, 12.3k, 1.23M. */
export function short(value) {
  if (!known(value)) return DASH;
  let unit = "";
  for (unit of ["", "k", "M", "G", "T"]) {
    if (Math.abs(value) < 999.5 || unit === "T") break;
    value /= 1000;
  }
  if (!unit && value === Math.round(value)) return String(value);
  return threeDigits(value) + unit;
}

/** 12.3 MB. */
export function bytes(value) {
  if (!known(value)) return DASH;
  const text = short(Math.round(value));
  return /[a-zA-Z]$/.test(text) ? `${text.slice(0, -1)} ${text.slice(-1)}B` : `${text} B`;
}

export const byteRate = (value) => (known(value) ? `${bytes(value)}/s` : DASH);

/** A loss: four decimals where that says something. */
export function number(value) {
  if (!known(value)) return DASH;
  return value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4) ? value.toFixed(4) : value.toExponential(2);
}

/** As short as its size allows, for an axis. */
export function axis(value) {
  const size = Math.abs(value);
  if (size >= 10000) return short(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

/** 0:41, 12:05, 3:00:00, 2d 3:00:00. */
export function clock(seconds) {
  if (!known(seconds) || seconds < 0) return DASH;
  const total = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  const [s, m, h, d] = [total % 60, Math.floor(total / 60) % 60, Math.floor(total / 3600) % 24, Math.floor(total / 86400)];
  if (d) return `${d}d ${h}:${two(m)}:${two(s)}`;
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** 850 µs, 12.3 ms, 1.25 s. */
export function duration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds >= 0.9995) return `${threeDigits(seconds)} s`;
  if (seconds >= 0.9995e-3) return `${threeDigits(seconds * 1e3)} ms`;
  return seconds === 0 ? "0 s" : `${threeDigits(seconds * 1e6)} µs`;
}

export const percent = (share) => (known(share) ? `${Math.round(share * 100)} %` : DASH);

export const degrees = (value) => (known(value) ? `${Math.round(value)} °C` : DASH);

export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : DASH);

/** The time of day here, of seconds since 1970. */
export function timeOfDay(seconds) {
  return known(seconds) ? new Date(seconds * 1000).toLocaleTimeString([], { hour12: false }) : DASH;
}

export function day(seconds) {
  if (!known(seconds)) return DASH;
  const date = new Date(seconds * 1000);
  return `${date.toLocaleDateString([], { month: "short", day: "numeric" })} ${date.toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit" })}`;
}

/** Tokens where there are any, samples for data that has none. */
export function rate(numbers) {
  if (numbers.tokens_per_s) return [short(numbers.tokens_per_s), "tokens/s"];
  return [short(numbers.samples_per_s), "samples/s"];
}

export { DASH, known };
