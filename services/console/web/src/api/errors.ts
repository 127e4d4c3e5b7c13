/** An answer of the server that is no success, with the sentence it gave. */
export class ApiError extends Error {
  override name = "ApiError";
  readonly status: number;

  constructor(status: number, detail: string) {
    super(detail);
    this.status = status;
  }
}

interface Invalid {
  loc?: unknown[];
  msg?: string;
}

/** Reads the sentence of an error answer: `{"detail": …}`, FastAPI's list of invalid fields, or plain text. */
export function readDetail(body: string, status: number): string {
  let detail: unknown = body;
  try {
    const parsed: unknown = JSON.parse(body);
    if (typeof parsed === "object" && parsed !== null && "detail" in parsed) detail = parsed.detail;
  } catch {
    // Not JSON: a proxy's answer.
  }
  if (Array.isArray(detail)) {
    const faults = (detail as Invalid[]).map(({ loc = [], msg = "" }) => `${loc.slice(1).join(".")}: ${msg}`);
    return faults.join("; ");
  }
  if (typeof detail === "string" && detail.trim() !== "" && !detail.trimStart().startsWith("<")) return detail;
  return `the server answered with status ${status}`;
}

/** Says what went wrong, in one sentence. */
export function describeError(error: unknown): string {
  if (error instanceof ApiError) return error.message;
  // fetch throws a TypeError when no server answers; browsers word it differently.
  if (error instanceof TypeError && /fetch|network|load failed/i.test(error.message)) {
    return "The console does not answer: is `forage console` still running?";
  }
  return error instanceof Error ? error.message : String(error);
}

/** Whether the same request could succeed in a moment: no server, or one that is overloaded or waits. */
export function isWorthRetrying(error: unknown): boolean {
  return !(error instanceof ApiError) || error.status >= 500;
}
