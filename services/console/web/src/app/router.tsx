import { createBrowserRouter, type RouteObject } from "react-router";
import { Layout } from "./Layout";
import { RouteError } from "./RouteError";

type Module = Promise<{ default: React.ComponentType }>;

function page(path: string, load: () => Module): RouteObject {
  return { path, lazy: async () => ({ Component: (await load()).default }), ErrorBoundary: RouteError };
}

export const routes: RouteObject[] = [
  {
    Component: Layout,
    ErrorBoundary: RouteError,
    HydrateFallback: () => null,
    children: [
      page("/", () => import("../pages/RunsPage")),
      page("/compare", () => import("../pages/ComparePage")),
      page("/runs/:run", () => import("../pages/RunPage")),
      page("/runs/:run/steps/:step", () => import("../pages/StepPage")),
      page("/runs/:run/trajectories", () => import("../pages/TrajectoriesPage")),
      page("/runs/:run/trajectories/:place/:row", () => import("../pages/TrajectoryPage")),
      page("/runs/:run/groups/:place/:uid", () => import("../pages/GroupPage")),
      page("/runs/:run/questions", () => import("../pages/QuestionsPage")),
      page("/runs/:run/questions/:uid", () => import("../pages/QuestionPage")),
      page("/runs/:run/health", () => import("../pages/HealthPage")),
      page("/runs/:run/ask", () => import("../pages/AskPage")),
      page("*", () => import("../pages/NotFoundPage")),
    ],
  },
];

export const createRouter = () => createBrowserRouter(routes);
