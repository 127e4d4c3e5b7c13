import { screen, waitFor, within } from "@testing-library/react";
import { render } from "@testing-library/react";
import userEvent from "@testing-library/user-event";
import type { ReactElement } from "react";
import { createMemoryRouter, RouterProvider } from "react-router";
import { beforeEach, expect, test, vi } from "vitest";
import { answer } from "../testing/render";
import { paths } from "./paths";
import { Providers } from "./Providers";
import { routes } from "./router";

beforeEach(() => {
  vi.stubGlobal(
    "EventSource",
    class {
      close() {
        return undefined;
      }
    },
  );
  answer({});
});

function open(address: string) {
  const router = createMemoryRouter(routes, { initialEntries: [address] });
  render(
    <Providers>
      <RouterProvider router={router} />
    </Providers>,
  );
  return { router, user: userEvent.setup() };
}

test("every address has a page of its own", async () => {
  const addresses = [
    paths.runs(),
    paths.compare("a", "b"),
    paths.run("r 1"),
    paths.step("r", 10),
    paths.trajectories("r", { text: "a b" }),
    paths.trajectory("r", "step-10", 3),
    paths.group("r", "step-10", "nq/12?#"),
    paths.questions("r"),
    paths.question("r", "nq/12"),
    paths.health("r"),
    paths.ask("r"),
  ];
  const modules = new Set<unknown>();
  for (const address of addresses) {
    const router = createMemoryRouter(routes, { initialEntries: [address] });
    await waitFor(() => {
      expect(router.state.initialized).toBe(true);
    });
    const route = router.state.matches.at(-1)?.route;
    expect(route?.path, address).not.toBe("*");
    modules.add((route as { element?: ReactElement } | undefined)?.element?.type);
  }
  expect(modules.size).toBe(addresses.length);
});

test("g and a letter go to a page of the run", async () => {
  const { router, user } = open("/runs/demo%201/nonsense");
  expect(await screen.findByRole("heading", { name: "No such page" })).toBeInTheDocument();
  await user.keyboard("gr");
  await waitFor(() => {
    expect(router.state.location.pathname).toBe("/");
  });
});

test("the navigation marks the section that is shown", async () => {
  open("/runs/r/health");
  const navigation = await screen.findByRole("navigation", { name: "This run" });
  await waitFor(() => {
    expect(within(navigation).getByRole("link", { current: "page" })).toHaveTextContent("Health");
  });
});

test("? lists the keys of the page", async () => {
  const { user } = open("/runs/r/ask");
  await screen.findByRole("navigation", { name: "This run" });
  await user.keyboard("?");
  const keys = await screen.findByTestId("keys");
  expect(keys).toHaveTextContent("Go to Trajectories");
  expect(keys).toHaveTextContent("Go to all runs");
});
