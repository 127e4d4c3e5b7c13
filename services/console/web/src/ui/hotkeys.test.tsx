import { screen } from "@testing-library/react";
import { useState } from "react";
import { expect, test } from "vitest";
import { renderAt } from "../testing/render";
import { useHotkeyList, useHotkeys } from "./hotkeys";

function Probe() {
  const [pressed, setPressed] = useState<string[]>([]);
  const [hasOverlay, setOverlay] = useState(false);
  const press = (name: string) => () => {
    setPressed([...pressed, name]);
  };
  useHotkeys([
    { keys: "j", label: "Next", run: press("j") },
    { keys: "g t", label: "Trajectories", run: press("g t") },
    { keys: "t", label: "Theme", run: press("t") },
    { keys: "Enter", label: "Open", run: press("Enter") },
    {
      keys: "o",
      label: "Overlay",
      run: () => {
        setOverlay(!hasOverlay);
      },
    },
  ]);
  return (
    <>
      <output>{pressed.join(",")}</output>
      <input aria-label="text" />
      <button>button</button>
      {hasOverlay && <Overlay />}
      <Keys />
    </>
  );
}

function Overlay() {
  const [count, setCount] = useState(0);
  useHotkeys([
    {
      keys: "j",
      label: "Next in the overlay",
      run: () => {
        setCount(count + 1);
      },
    },
  ]);
  return <p>overlay {count}</p>;
}

function Keys() {
  const list = useHotkeyList();
  const [shown, setShown] = useState("");
  return (
    <>
      <button
        onClick={() => {
          setShown(
            list()
              .map(({ keys, label }) => `${keys}=${label}`)
              .join(" "),
          );
        }}
      >
        list
      </button>
      <p data-testid="list">{shown}</p>
    </>
  );
}

const pressed = () => screen.getByRole("status").textContent;

test("keys run the newest function, also twice", async () => {
  const { user } = renderAt(<Probe />);
  await user.keyboard("jj");
  expect(pressed()).toBe("j,j");
});

test("two keys after each other are not the second alone", async () => {
  const { user } = renderAt(<Probe />);
  await user.keyboard("gtt");
  expect(pressed()).toBe("g t,t");
});

test("what is typed into a field, and keys with Ctrl, are no commands", async () => {
  const { user } = renderAt(<Probe />);
  await user.type(screen.getByLabelText("text"), "jt");
  expect(pressed()).toBe("");
  await user.click(document.body);
  await user.keyboard("{Control>}j{/Control}");
  expect(pressed()).toBe("");
});

test("Enter on a button belongs to the button", async () => {
  const { user } = renderAt(<Probe />);
  screen.getByText("button").focus();
  await user.keyboard("{Enter}");
  expect(pressed()).toBe("");
  screen.getByText("button").blur();
  await user.keyboard("{Enter}");
  expect(pressed()).toBe("Enter");
});

test("what opened last has the key, until it closes", async () => {
  const { user } = renderAt(<Probe />);
  await user.keyboard("ojj");
  expect(screen.getByText("overlay 2")).toBeInTheDocument();
  expect(pressed()).toBe("");
  await user.click(screen.getByText("list"));
  expect(screen.getByTestId("list")).toHaveTextContent(/^j=Next in the overlay .*t=Theme/);
  screen.getByText("list").blur();
  await user.keyboard("oj");
  expect(pressed()).toBe("j");
});
