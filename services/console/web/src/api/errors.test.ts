import { expect, test } from "vitest";
import { ApiError, describeError, isWorthRetrying, readDetail } from "./errors";

test.each([
  ['{"detail": "no run is called x: see forage runs"}', "no run is called x: see forage runs"],
  [
    '{"detail": [{"loc": ["query", "limit"], "msg": "Input should be less than or equal to 500"}]}',
    "limit: Input should be less than or equal to 500",
  ],
  ["Bad gateway", "Bad gateway"],
  ["<html><h1>502</h1></html>", "the server answered with status 502"],
  ["", "the server answered with status 502"],
  ['{"error": 1}', '{"error": 1}'],
  ["null", "null"],
])("the answer %s says: %s", (body, sentence) => {
  expect(readDetail(body, 502)).toBe(sentence);
});

test("a server that is gone is named as such", () => {
  expect(describeError(new TypeError("Failed to fetch"))).toContain("forage console");
  expect(describeError(new TypeError("x is undefined"))).toBe("x is undefined");
  expect(describeError(new ApiError(404, "no such run"))).toBe("no such run");
  expect(describeError("oops")).toBe("oops");
});

test("what the request itself is to blame for is not tried again", () => {
  expect(isWorthRetrying(new ApiError(404, ""))).toBe(false);
  expect(isWorthRetrying(new ApiError(503, ""))).toBe(true);
  expect(isWorthRetrying(new TypeError("Failed to fetch"))).toBe(true);
});
