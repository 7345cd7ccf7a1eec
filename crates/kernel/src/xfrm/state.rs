//! States: one security association, one direction each.

use std::collections::HashMap;

use rustix::io::Errno;

use super::{
    Xfrm,
    codec::{self, DELSA, GETSA, NEWSA, State},
    spec::{OwnState, StateId, StateSpec, StateUsage},
};
use crate::{
    error::KernelError,
    netlink::{error::RequestError, reader::Message},
};

/// From this many states on, listing all is quicker than asking for each.
const LIST_STATES_MIN: usize = 64;

impl Xfrm {
    /// Adds states and returns the results in order. An existing state is never replaced, not even by an
    /// identical one: its sequence number would start again under its key.
    ///
    /// # Errors
    /// For each: [`KernelError::SpiTaken`], [`KernelError::NoCipher`], [`KernelError::NoEsp`],
    /// [`KernelError::NoPerCpu`], [`KernelError::InvalidXfrm`], or another refusal of the kernel.
    pub async fn add_states(&self, specs: &[StateSpec]) -> Vec<Result<(), KernelError>> {
        let can = match self.abilities().await {
            Ok(can) => can,
            Err(error) => {
                let mut first = Some(error);
                return specs
                    .iter()
                    .map(|spec| Err(first.take().unwrap_or_else(|| unknown(spec))))
                    .collect();
            }
        };
        let mut requests = Vec::with_capacity(specs.len());
        let mut results = Vec::with_capacity(specs.len());
        for spec in specs {
            let fit = match spec.check() {
                Ok(()) if spec.cpu.is_some() && !can.per_cpu => Err(KernelError::NoPerCpu),
                checked => checked,
            };
            if fit.is_ok() {
                requests.push(codec::new_state(spec, can).request(NEWSA));
            }
            results.push(fit);
        }
        let mut outcomes = self.socket().change(requests).await.into_iter();
        for (spec, result) in specs.iter().zip(&mut results).filter(|(_, result)| result.is_ok()) {
            if let Some(Err(error)) = outcomes.next() {
                *result = Err(refused(error, spec));
            }
        }
        results
    }

    /// Removes states of ours and returns for each whether it existed. A state that is not ours but has such
    /// an id stays and counts as absent.
    ///
    /// # Errors
    /// For each: the kernel's refusal.
    pub async fn remove_states(&self, ids: &[StateId]) -> Vec<Result<bool, KernelError>> {
        let found = self.look_up(ids).await;
        let own =
            |found: &Result<Option<State>, _>| matches!(found, Ok(Some(state)) if state.is_own());
        let requests: Vec<_> = ids
            .iter()
            .zip(&found)
            .filter(|(_, found)| own(found))
            .map(|(id, _)| codec::state_id(*id).request(DELSA))
            .collect();
        let mut outcomes = self.socket().change(requests).await.into_iter();
        let results = ids.iter().zip(found).map(|(id, found)| {
            if own(&found) { removed(outcomes.next(), *id) } else { found.map(|_| false) }
        });
        results.collect()
    }

    /// The states of ours that the kernel has.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn own_states(&self) -> Result<Vec<OwnState>, KernelError> {
        let all = self.all_states().await?;
        Ok(all.into_iter().filter(|state| state.keyed).map(|state| state.own).collect())
    }

    /// The kernel's counters of states of ours; `None` for a state that it does not have.
    ///
    /// # Errors
    /// For each: the kernel's refusal.
    pub async fn usage(&self, ids: &[StateId]) -> Vec<Result<Option<StateUsage>, KernelError>> {
        let usage = |state: State| (state.is_own() && state.keyed).then_some(state.own.usage);
        let found = self.look_up(ids).await.into_iter();
        found.map(|found| found.map(|state| state.and_then(usage))).collect()
    }

    pub(super) async fn remove_own_states(&self) -> Result<usize, KernelError> {
        let mut ids: Vec<StateId> =
            self.all_states().await?.iter().map(|state| state.own.id).collect();
        // A placeholder without an SPI has no name to remove it by; the kernel does so in a while.
        ids.retain(|id| id.spi != 0);
        let mut count = 0;
        for result in self.remove_states(&ids).await {
            count += usize::from(result?);
        }
        Ok(count)
    }

    /// States of ours and placeholders for them.
    async fn all_states(&self) -> Result<Vec<State>, KernelError> {
        let states = self
            .socket()
            .dump(codec::all_states().listing(GETSA), read)
            .await
            .map_err(|error| error.while_doing("list the IPsec states"))?;
        Ok(states.into_iter().filter(State::is_own).collect())
    }

    /// The states with these ids. If there are many ids, states of others count as absent.
    pub(super) async fn look_up(&self, ids: &[StateId]) -> Vec<Result<Option<State>, KernelError>> {
        if ids.len() >= LIST_STATES_MIN
            && let Ok(all) = self.all_states().await
        {
            let all: HashMap<_, _> = all.into_iter().map(|state| (state.own.id, state)).collect();
            return ids.iter().map(|id| Ok(all.get(id).cloned())).collect();
        }
        let requests: Vec<_> = ids.iter().map(|id| codec::state_id(*id).request(GETSA)).collect();
        let outcomes = self.socket().run(requests, read).await;
        let found = outcomes.into_iter().zip(ids).map(|(outcome, id)| match outcome {
            Ok(found) => Ok(found),
            Err(error) if error.is(Errno::SRCH) => Ok(None),
            Err(error) => Err(error.while_doing(format!("read {}", name(*id)))),
        });
        found.collect()
    }
}

fn read(message: &Message<'_>) -> Option<State> {
    (message.kind == NEWSA).then(|| codec::read_state(message.body)).flatten()
}

fn removed(outcome: Option<Result<(), RequestError>>, id: StateId) -> Result<bool, KernelError> {
    match outcome {
        Some(Ok(())) => Ok(true),
        Some(Err(error)) if !error.is(Errno::SRCH) => {
            Err(error.while_doing(format!("remove {}", name(id))))
        }
        _ => Ok(false),
    }
}

pub(super) fn name(id: StateId) -> String {
    format!("the IPsec state for SPI {:#010x} to {}", id.spi, id.destination)
}

/// Maps the kernel's refusal to add a state.
pub(super) fn refused(error: RequestError, spec: &StateSpec) -> KernelError {
    if error.is(Errno::EXIST) {
        return KernelError::SpiTaken { spi: spec.spi, destination: spec.destination };
    }
    // ENOSYS: it does not know the name; ENOENT: it knows it, and a part of the algorithm is missing.
    if error.is(Errno::NOSYS) || error.is(Errno::NOENT) {
        let cipher = spec.cipher.name();
        return KernelError::NoCipher { cipher, known: error.is(Errno::NOENT) };
    }
    if error.is(Errno::PROTONOSUPPORT) || error.is(Errno::AFNOSUPPORT) {
        let family = if spec.destination.is_ipv4() { "IPv4" } else { "IPv6" };
        return KernelError::NoEsp { family };
    }
    error.while_doing(format!("add {}", name(spec.id())))
}

fn unknown(spec: &StateSpec) -> KernelError {
    RequestError::TimedOut.while_doing(format!("add {}", name(spec.id())))
}
