// Numbers as readers expect them. What is unknown (null, undefined, NaN) is a dash, never 0.
export const UNKNOWN = "–";

type Maybe = number | null | undefined;

function isKnown(value: Maybe): value is number {
  return value !== null && value !== undefined && Number.isFinite(value);
}

/** Formats a number with `digits` significant digits: 0.00012 → 1.2e-4, 12345 → 12,345. */
export function formatNumber(value: Maybe, digits = 4): string {
  if (!isKnown(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9))
    return value.toExponential(Math.max(0, digits - 3)).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const decimals = size >= 1000 ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { maximumFractionDigits: Math.min(decimals, digits) });
}

/** Formats a share of one in percent: 0.4231 → 42.3 %. */
export function formatScore(value: Maybe, decimals = 1): string {
  return isKnown(value) ? `${(100 * value).toFixed(decimals)} %` : UNKNOWN;
}

/** Formats seconds: 0.42 → 0.42 s, 75 → 1 min 15 s, 93784 → 1 d 2 h. */
export function formatDuration(seconds: Maybe): string {
  if (!isKnown(seconds)) return UNKNOWN;
  if (seconds < 0) return `-${formatDuration(-seconds)}`;
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return join(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(whole / 60);
  if (minutes < 1440) return join(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(minutes / 60);
  return join(Math.floor(hours / 24), "d", hours % 24, "h");
}

function join(big: number, unit: string, small: number, smallUnit: string): string {
  return small === 0 ? `${big} ${unit}` : `${big} ${unit} ${small} ${smallUnit}`;
}

const SIZES = ["B", "kB", "MB", "GB", "TB"];

/** Formats bytes in powers of 1000: 1234567 → 1.23 MB. */
export function formatBytes(bytes: Maybe): string {
  if (!isKnown(bytes)) return UNKNOWN;
  let size = bytes;
  let unit = 0;
  while (size >= 999.5 && unit < SIZES.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? size : Number(size.toPrecision(3))} ${SIZES[unit] ?? ""}`;
}

/** Formats a point in time in the reader's zone. */
export function formatTime(time: string | number | null | undefined): string {
  if (time === null || time === undefined) return UNKNOWN;
  const date = new Date(typeof time === "number" ? time * 1000 : time);
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  return date.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function NumberText({ value, digits }: { value: Maybe; digits?: number }) {
  return <span className="number">{formatNumber(value, digits)}</span>;
}

export function Duration({ seconds }: { seconds: Maybe }) {
  return <span className="number">{formatDuration(seconds)}</span>;
}

/** A score with its interval: 42.3 % (39.1–45.6). */
export function Score({ value, low, high }: { value: Maybe; low?: Maybe; high?: Maybe }) {
  return (
    <span className="number">
      {formatScore(value)}
      {isKnown(low) && isKnown(high) && (
        <span className="quiet">
          {" "}
          ({(100 * low).toFixed(1)}–{(100 * high).toFixed(1)})
        </span>
      )}
    </span>
  );
}
