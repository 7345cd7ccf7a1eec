//! Policies: which packets are sealed, and on which state.

use rustix::io::Errno;

use super::{
    Xfrm,
    codec::{self, DELPOLICY, GETPOLICY, NEWPOLICY, Policy, UPDPOLICY},
    spec::{EntryPolicy, OwnPolicy, PolicyId, PolicySpec},
};
use crate::{
    error::KernelError,
    netlink::{error::RequestError, reader::Message},
};

impl Xfrm {
    /// Applies each of these policies and returns the results in order. It adds a policy, replaces one of
    /// ours in one step (no packet finds none), or sends nothing if the policy is already so. Add the state
    /// that it names first. Remove the state that it named before no sooner than [`super::DRAIN_MS`] later.
    ///
    /// # Errors
    /// For each: [`KernelError::PolicyTaken`] if a policy that is not ours has the same selector,
    /// [`KernelError::InvalidXfrm`], or another refusal of the kernel.
    pub async fn set_policies(&self, specs: &[PolicySpec]) -> Vec<Result<(), KernelError>> {
        let ids: Vec<_> = specs.iter().map(|spec| spec.id).collect();
        let found = self.find_policies(&ids).await;
        let mut requests = Vec::new();
        let mut asked = Vec::new();
        let mut results = Vec::with_capacity(specs.len());
        for (index, (spec, found)) in specs.iter().zip(found).enumerate() {
            let kind = spec.check().and_then(|()| change(spec, found?));
            if let Ok(Some(kind)) = kind {
                requests.push(codec::policy(spec).request(kind));
                asked.push(index);
            }
            results.push(kind.map(|_| ()));
        }
        let outcomes = self.socket().change(requests).await;
        for (index, outcome) in asked.into_iter().zip(outcomes) {
            if let Err(error) = outcome {
                results[index] = Err(refused(error, &specs[index].id));
            }
        }
        results
    }

    /// Removes policies of ours and returns for each whether it existed. A policy that is not ours but has
    /// such a selector stays and counts as absent.
    ///
    /// # Errors
    /// For each: the kernel's refusal.
    pub async fn remove_policies(&self, ids: &[PolicyId]) -> Vec<Result<bool, KernelError>> {
        let found = self.find_policies(ids).await;
        let own = |found: Option<Policy>| found.filter(Policy::is_own);
        let found: Vec<_> = found.into_iter().map(|found| found.map(own)).collect();
        let requests: Vec<_> = found
            .iter()
            .filter_map(|found| found.as_ref().ok()?.as_ref())
            .map(|policy| codec::policy_by_index(policy).request(DELPOLICY))
            .collect();
        let mut outcomes = self.socket().change(requests).await.into_iter();
        let results = ids.iter().zip(found).map(|(id, found)| match found? {
            None => Ok(false),
            Some(_) => match outcomes.next() {
                Some(Err(error)) if !error.is(Errno::NOENT) => {
                    Err(error.while_doing(format!("remove {}", name(id))))
                }
                outcome => Ok(matches!(outcome, Some(Ok(_)))),
            },
        });
        results.collect()
    }

    /// The policies of ours that the kernel has. Leaves out policies under our reqid that [`PolicySpec`]
    /// cannot express; [`Xfrm::remove_own`] removes them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn own_policies(&self) -> Result<Vec<OwnPolicy>, KernelError> {
        let all = self.all_policies().await?;
        Ok(all.into_iter().filter_map(|policy| policy.own).collect())
    }

    /// Makes `wanted` all of our inbound policies: adds, replaces and removes differences. Returns how many
    /// it changed.
    ///
    /// # Errors
    /// [`KernelError::EntryTaken`] if a policy that is not ours has the same selector,
    /// [`KernelError::InvalidXfrm`], or another refusal of the kernel.
    pub async fn set_entry_policies(&self, wanted: &[EntryPolicy]) -> Result<usize, KernelError> {
        wanted.iter().try_for_each(EntryPolicy::check)?;
        let found: Vec<Policy> =
            self.all_policies().await?.into_iter().filter(Policy::is_inbound).collect();
        let missing: Vec<EntryPolicy> = wanted
            .iter()
            .filter(|wanted| found.iter().all(|found| found.entry.as_ref() != Some(wanted)))
            .copied()
            .collect();
        // Remove unwanted policies of ours first: one may have the selector of a wanted policy.
        let is_wanted = |entry: &EntryPolicy| wanted.contains(entry);
        let surplus = found.iter().filter(|found| !found.entry.as_ref().is_some_and(is_wanted));
        let removals = surplus.map(|found| codec::policy_by_index(found).request(DELPOLICY));
        let removals: Vec<_> = removals.collect();
        let changes = removals.len() + missing.len();
        for outcome in self.socket().change(removals).await {
            match outcome {
                Err(error) if !error.is(Errno::NOENT) => {
                    return Err(error.while_doing("remove an inbound IPsec policy"));
                }
                _ => {}
            }
        }
        let additions = missing.iter().map(|entry| codec::entry_policy(entry).request(NEWPOLICY));
        let additions: Vec<_> = additions.collect();
        for (outcome, entry) in self.socket().change(additions).await.into_iter().zip(&missing) {
            let EntryPolicy { source, prefix, port, .. } = *entry;
            match outcome {
                Ok(_) => {}
                Err(error) if error.is(Errno::EXIST) => {
                    return Err(KernelError::EntryTaken { from: source, prefix, port });
                }
                Err(error) => {
                    let doing = format!(
                        "set the inbound IPsec policy from {source}/{prefix} to UDP port {port}"
                    );
                    return Err(error.while_doing(doing));
                }
            }
        }
        Ok(changes)
    }

    pub(super) async fn remove_own_policies(&self) -> Result<usize, KernelError> {
        let policies = self.all_policies().await?;
        let requests: Vec<_> = policies
            .iter()
            .map(|policy| codec::policy_by_index(policy).request(DELPOLICY))
            .collect();
        let mut count = 0;
        for outcome in self.socket().change(requests).await {
            match outcome {
                Ok(_) => count += 1,
                Err(error) if error.is(Errno::NOENT) => {}
                Err(error) => return Err(error.while_doing("remove the IPsec policies")),
            }
        }
        Ok(count)
    }

    async fn all_policies(&self) -> Result<Vec<Policy>, KernelError> {
        let policies = self
            .socket()
            .dump(codec::all_policies().listing(GETPOLICY), read)
            .await
            .map_err(|error| error.while_doing("list the IPsec policies"))?;
        let has_way = |policy: &Policy| policy.is_outbound() || policy.is_inbound();
        let is_wanted = |policy: &Policy| policy.is_own() && has_way(policy);
        Ok(policies.into_iter().filter(is_wanted).collect())
    }

    async fn find_policies(&self, ids: &[PolicyId]) -> Vec<Result<Option<Policy>, KernelError>> {
        let requests: Vec<_> =
            ids.iter().map(|id| codec::policy_by_selector(id).request(GETPOLICY)).collect();
        let outcomes = self.socket().run(requests, read).await;
        let found = outcomes.into_iter().zip(ids).map(|(outcome, id)| match outcome {
            Ok(found) => Ok(found),
            Err(error) if error.is(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.while_doing(format!("read {}", name(id)))),
        });
        found.collect()
    }
}

/// The message that makes the policy as stated; `None`: it is.
fn change(spec: &PolicySpec, found: Option<Policy>) -> Result<Option<u16>, KernelError> {
    match found {
        None => Ok(Some(NEWPOLICY)),
        Some(policy) if !policy.is_own() => Err(taken(&spec.id)),
        Some(policy) if policy.own.as_ref() == Some(spec) => Ok(None),
        Some(_) => Ok(Some(UPDPOLICY)),
    }
}

fn read(message: &Message<'_>) -> Option<Policy> {
    (message.kind == NEWPOLICY).then(|| codec::read_policy(message.body)).flatten()
}

fn refused(error: RequestError, id: &PolicyId) -> KernelError {
    if error.is(Errno::EXIST) {
        return taken(id);
    }
    error.while_doing(format!("set {}", name(id)))
}

const fn taken(id: &PolicyId) -> KernelError {
    KernelError::PolicyTaken { from: id.source, to: id.destination, port: id.port }
}

fn name(id: &PolicyId) -> String {
    format!("the IPsec policy from {} to {} UDP port {}", id.source, id.destination, id.port)
}
