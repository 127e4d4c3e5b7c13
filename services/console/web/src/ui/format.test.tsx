import { render } from "@testing-library/react";
import { expect, test } from "vitest";
import { formatBytes, formatDuration, formatNumber, formatScore, formatTime, Score } from "./format";

test.each([
  [0, "0"],
  [12345, "12,345"],
  [0.123456, "0.1235"],
  [0.00012, "1.2e-4"],
  [-3.14159, "-3.142"],
  [1234.56, "1,235"],
  [5e10, "5.0e10"],
  [null, "–"],
  [undefined, "–"],
  [Number.NaN, "–"],
  [Infinity, "–"],
])("the number %s is shown as %s", (value, text) => {
  expect(formatNumber(value)).toBe(text);
});

test.each([
  [0.042, "42 ms"],
  [0.0996, "0.10 s"],
  [9.996, "10 s"],
  [59.6, "1 min"],
  [75, "1 min 15 s"],
  [3600, "1 h"],
  [3599.7, "1 h"],
  [7380, "2 h 3 min"],
  [86399, "1 d"],
  [93784, "1 d 2 h"],
  [-75, "-1 min 15 s"],
  [null, "–"],
])("%s seconds are shown as %s", (seconds, text) => {
  expect(formatDuration(seconds)).toBe(text);
});

test.each([
  [0, "0 B"],
  [999, "999 B"],
  [999.7, "1 kB"],
  [1234567, "1.23 MB"],
  [5e12, "5 TB"],
  [5e15, "5000 TB"],
  [null, "–"],
])("%s bytes are shown as %s", (bytes, text) => {
  expect(formatBytes(bytes)).toBe(text);
});

test("a score that is not known is no 0 %", () => {
  expect(formatScore(0)).toBe("0.0 %");
  expect(formatScore(null)).toBe("–");
});

test("an interval is shown only where both ends are known", () => {
  expect(render(<Score value={0.4231} low={0.391} high={0.456} />).container).toHaveTextContent("42.3 % (39.1–45.6)");
  expect(render(<Score value={0.4231} low={0.391} high={null} />).container.textContent).toBe("42.3 %");
});

test("a time that is none is a dash", () => {
  expect(formatTime("yesterday")).toBe("–");
  expect(formatTime(null)).toBe("–");
  expect(formatTime(0)).toContain("1970");
});
