import { render } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import { QueryClient } from "@tanstack/react-query";
import type { ReactElement } from "react";
import { createMemoryRouter, RouterProvider } from "react-router";
import { vi } from "vitest";
import { Providers } from "../app/Providers";

/** Renders a page or component at an address, with theme, queries and keys around it; errors are not retried. */
export function renderAt(element: ReactElement, { address = "/", path = "*" } = {}) {
  const elsewhere = path === "*" ? [] : [{ path: "*", element: <p>another page</p> }];
  const router = createMemoryRouter([{ path, element }, ...elsewhere], { initialEntries: [address] });
  const client = new QueryClient({ defaultOptions: { queries: { retry: false } } });
  const view = render(
    <Providers client={client} isTest>
      <RouterProvider router={router} />
    </Providers>,
  );
  return { ...view, router, client, user: userEvent.setup() };
}

/** Answers the API's requests in tests: by "METHOD /path", with JSON, a function that makes it, or an Error. */
export function answer(answers: Record<string, unknown>): { requests: Request[] } {
  const requests: Request[] = [];
  const reply: typeof fetch = async (input, init) => {
    const request = new Request(input, init);
    requests.push(request.clone());
    const { pathname } = new URL(request.url);
    const found = answers[`${request.method} ${pathname}`];
    if (found instanceof Error) throw found;
    if (typeof found === "function") return Response.json((found as (request: Request) => unknown)(request));
    if (found instanceof Response) return found.clone();
    if (found === undefined) return Response.json({ detail: `no answer for ${pathname}` }, { status: 404 });
    await Promise.resolve();
    return Response.json(found);
  };
  vi.stubGlobal("fetch", reply);
  return { requests };
}
