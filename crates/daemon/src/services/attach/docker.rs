//! Docker's containers that `weft attach` has attached: the engine tells when they start and when they are renamed.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_api::Attachment;
use weft_container::{ContainerError, DockerFailure, Sandbox};

use super::maker::{Maker, docker_key};
use super::names::printable;
use super::{Attachments, Saved};
use crate::core::control::Request;

impl Attachments {
    /// The ids of Docker's containers that `weft attach` has attached, those that have ended among them.
    pub(crate) fn docker_containers(&self) -> BTreeSet<String> {
        let shown = self.shown.borrow();
        shown.iter().filter_map(container_of).map(str::to_owned).collect()
    }

    /// Whether the container with this id is one of them.
    pub(crate) fn has_docker_container(&self, id: &str) -> bool {
        self.shown.borrow().iter().any(|attachment| container_of(attachment) == Some(id))
    }

    /// Waits until there is one.
    pub(crate) async fn a_docker_container(&self) {
        let is_there = |all: &Arc<Vec<Attachment>>| all.iter().any(|it| container_of(it).is_some());
        // The sender is in `self`.
        let _ = self.shown.subscribe().wait_for(is_there).await;
    }

    /// Docker has started or renamed a container: attaches it again, and follows its name. Returns false if Docker
    /// does not answer.
    pub(crate) async fn look_again(&self, container: &str) -> bool {
        let key = docker_key(container);
        // Docker may be slow, so the lock is not held meanwhile.
        let found = match weft_container::resolve(&key, &self.resolve).await {
            Ok(found) => found,
            Err(ContainerError::Docker { docker: DockerFailure::TimedOut { .. }, .. }) => {
                return false;
            }
            // One that has ended is noticed by its interface.
            Err(_) => return true,
        };
        let mut inner = self.lock().await;
        let is_meant = |saved: &Saved| saved.maker == Maker::Command && saved.sandbox.id == key;
        let meant = inner.saved.iter().filter(|(_, saved)| is_meant(saved));
        let ids: Vec<String> = meant.map(|(id, _)| id.clone()).collect();
        for id in ids {
            self.bring_back(&mut inner, &id, found.clone()).await;
            let attached = inner.saved.get(&id).filter(|saved| saved.is_attached());
            let Some(mut saved) = attached.cloned() else { continue };
            let is_renamed = saved.follow_name(&found);
            let shown = saved.shown();
            inner.put(id, saved);
            if is_renamed {
                self.save_or_later(&inner);
                self.tell(Request::Announce { attachment: shown.into() }).await;
            }
        }
        true
    }
}

impl Saved {
    /// Its container has been found again: in another namespace, perhaps under another name.
    pub(super) fn found_again(&mut self, found: Sandbox) {
        self.follow_name(&found);
        self.sandbox = found;
    }

    /// Takes its container's name, unless the user has chosen another. Returns whether it is a new one.
    fn follow_name(&mut self, found: &Sandbox) -> bool {
        let before = std::mem::replace(&mut self.sandbox.name, found.name.clone());
        let is_new = before != found.name && self.attachment.name == printable(&before);
        if is_new {
            self.attachment.name = printable(&found.name);
        }
        is_new
    }
}

/// The id of a container of Docker's in a line of `weft ps`.
fn container_of(attachment: &Attachment) -> Option<&str> {
    let is_command = attachment.made_by == Maker::Command.name();
    // On another network than `weft`, the network's name and a slash come first.
    let (_, key) = attachment.id.rsplit_once('/').unwrap_or(("", &attachment.id));
    key.strip_prefix("docker:").filter(|_| is_command)
}
