import { MantineProvider } from "@mantine/core";
import { render, screen } from "@testing-library/react";
import { expect, test } from "vitest";
import { ExternalLink } from "./ExternalLink";

function show(href: string) {
  render(
    <MantineProvider>
      <ExternalLink address={href}>trace</ExternalLink>
    </MantineProvider>,
  );
}

test.each(["https://tempo.example/trace/1", "http://localhost:3000/1?a=b#c"])("%j is a link", (address) => {
  show(address);
  expect(screen.getByRole("link", { name: "trace" })).toHaveAttribute("href", address);
});

test.each([
  "javascript:alert(1)",
  "JaVaScRiPt:alert(1)",
  " javascript:alert(1)",
  "java\nscript:alert(1)",
  "\u0001javascript:alert(1)",
  "data:text/html,<script>alert(1)</script>",
  "vbscript:x",
  "blob:https://tempo.example/1",
  "file:///etc/passwd",
  "//tempo.example/1",
  "",
])("%j is text", (address) => {
  show(address);
  expect(screen.getByText("trace")).toBeInTheDocument();
  expect(document.querySelector("a")).toBeNull();
});
