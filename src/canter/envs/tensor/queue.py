"""Scheduling in a queueing network: which class of customers a shared server serves.

N environments, C customer classes, K classes that share the controlled server.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from canter.core.registry import UserError
from canter.core.specs import ACTION_MASK, Discrete, TensorSpec
from canter.core.struct import Obs
from canter.envs.tensor.base import EnvState, Outcome, TensorEnv

LEAVES = -1
"""Entry of `routing` for a class whose customers leave after service."""


@final
class QueueNetwork(TensorEnv):
    """Multi-class Markovian network; a step is one event of the uniformised chain.

    Class k gets Poisson arrivals of rate `arrival_rates[k]`, is served by server `servers[k]` at
    rate `service_rates[k]` and then joins class `routing[k]` or leaves (-1). Server 0 is
    controlled: action j serves the j-th of its classes until the next event (preemptive). Every
    other server has one class and never idles. The default is the criss-cross network of Harrison
    and Wein (1989), balanced at load 0.6: the classes 0 and 1 share server 0, and class 0 goes on
    to class 2 at server 1. One class with `servers=(0,)` is an M/M/1 queue, several without routing
    are the setting of the c-mu rule.

    Events come at the constant rate `event_rate` = all arrivals + the fastest class of each server;
    draws that match no active service change nothing. The action mask allows the classes with
    customers (all if there are none), so a masked policy never idles; serving an empty class idles
    until the next event. "policy" contains the C queue lengths, customers in service included.

    **Cost.** The reward is the negative holding cost of the step:
    `-(holding_costs . queue) * duration`, with the queue before the action. `Step.info["duration"]`
    is the constant mean 1 / event_rate, or an exponential draw of that mean with
    `sampled_duration`. So the long-run average cost per unit of time is

        -sum(reward) / sum(duration),

    with constant durations the same as `-event_rate * mean(reward)`. For an unbiased estimate set
    `max_episode_steps=None` and discard the first steps: every episode starts with empty queues. A
    discount `gamma` per step is the rate `event_rate * (1 - gamma) / gamma` in continuous time. The
    task never terminates; the step limit is a truncation.

    `Step.metrics`: "customers", the mean number in a network, and "idle", the fraction of networks
    in which nobody waits for the controlled server, both before the action.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        *,
        arrival_rates: Sequence[float] = (0.6, 0.6, 0.0),
        service_rates: Sequence[float] = (2.0, 2.0, 1.0),
        holding_costs: Sequence[float] = (1.0, 1.0, 1.0),
        servers: Sequence[int] = (0, 0, 1),
        routing: Sequence[int] = (2, LEAVES, LEAVES),
        sampled_duration: bool = False,
        max_episode_steps: int | None = 1000,
        random_start: bool = False,
    ) -> None:
        lengths = [len(values) for values in (arrival_rates, service_rates, holding_costs, servers, routing)]
        if len(set(lengths)) != 1:
            raise UserError(
                "arrival_rates, service_rates, holding_costs, servers and routing need one entry per class, "
                f"but have {lengths}"
            )
        if min(arrival_rates) < 0 or min(service_rates) <= 0:
            raise UserError(f"{arrival_rates=} must not be negative and {service_rates=} must be positive")
        if 0 not in servers or any(list(servers).count(server) > 1 for server in servers if server != 0):
            raise UserError(f"{servers=}: server 0 needs at least one class and every other server exactly one")
        if any(target != LEAVES and not 0 <= target < len(routing) for target in routing):
            raise UserError(f"{routing=}: entries are class numbers 0..{len(routing) - 1} or {LEAVES} (leaves)")
        num_classes = len(servers)
        controlled = [k for k in range(num_classes) if servers[k] == 0]
        obs = {"policy": TensorSpec((num_classes,)), ACTION_MASK: TensorSpec((len(controlled),), torch.bool)}
        super().__init__(
            "tensor:queue",
            num_envs,
            device,
            obs,
            Discrete(len(controlled)),
            max_episode_steps,
            random_start,
            durations=True,
        )
        fastest = {
            server: max(r for r, s in zip(service_rates, servers, strict=True) if s == server) for server in servers
        }
        self.event_rate = float(sum(arrival_rates) + sum(fastest.values()))
        self._sampled_duration = sampled_duration
        self._controlled = torch.tensor(controlled, device=self.device)
        to_tensor = partial(torch.tensor, dtype=torch.float32, device=self.device)
        self._holding_costs = to_tensor(holding_costs)
        self._arrival_rates = to_tensor(arrival_rates)
        is_served = [[server != 0 or k == chosen for k, server in enumerate(servers)] for chosen in controlled]
        self._rates = to_tensor(is_served) * to_tensor(service_rates)
        """Service rates `[K, C]` of each class under each action, if it has customers."""
        self._moves = self._move_table(routing)

    def _move_table(self, routing: Sequence[int]) -> Tensor:
        """Return the changes `[2C, C]` of the queues by C arrivals and C services."""
        num_classes = len(routing)
        table = torch.cat((torch.eye(num_classes), -torch.eye(num_classes)))
        for k, target in enumerate(routing):
            if target != LEAVES:
                table[num_classes + k, target] += 1.0
        return table.to(self.device)

    def _sample_state(self) -> EnvState:
        return {"queue": torch.zeros(self.num_envs, len(self._holding_costs), device=self.device)}

    def _advance(self, state: EnvState, action: Tensor) -> Outcome:
        queue = state["queue"]
        service = self._rates.index_select(0, action) * (queue > 0)
        upper = torch.cat((self._arrival_rates.expand_as(queue), service), -1).cumsum(-1)
        draw = self._uniform(0.0, self.event_rate, 1)
        # At most one half-open interval [lower, upper) holds the draw; a rate of 0 makes it empty.
        happens = (draw < upper).diff(dim=-1, prepend=torch.zeros_like(draw, dtype=torch.bool))
        after = queue + happens.to(queue.dtype) @ self._moves
        if self._sampled_duration:
            duration = -torch.log1p(-self._uniform(0.0, 1.0)) / self.event_rate
        else:
            duration = torch.full_like(queue[:, 0], 1.0 / self.event_rate)
        reward = -(queue * self._holding_costs).sum(-1) * duration
        never = torch.zeros_like(reward, dtype=torch.bool)
        nobody = ~(queue.index_select(-1, self._controlled) > 0).any(-1)
        metrics = {"customers": queue.sum(-1).mean(), "idle": nobody.float().mean()}
        return Outcome({"queue": after}, reward, never, info={"duration": duration}, metrics=metrics)

    def _observe(self, state: EnvState) -> Obs:
        present = state["queue"].index_select(-1, self._controlled) > 0
        return {"policy": state["queue"].clone(), ACTION_MASK: present | ~present.any(-1, keepdim=True)}
