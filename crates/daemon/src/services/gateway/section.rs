//! The section `openvpn` of the configuration file: carried out once at each start, as soon as that is possible.

use std::sync::Arc;
use std::time::Duration;

use weft_api::{ApiError, ServeRequest};

use super::Gateway;
use super::wanted::{FILE, Wanted};
use crate::config::Settings;
use crate::services::supervisor::Pulse;
use crate::upkeep::store::{Store, StoreError};

/// The pause before a section that cannot be done is tried again: a host may first need an authority, or a link to the
/// host that has one.
const RETRY: Duration = Duration::from_secs(2);

/// What the configuration file asks for.
#[derive(Clone)]
pub(super) struct Section {
    request: ServeRequest,
    /// Why it cannot be done yet.
    fault: Option<String>,
}

impl Section {
    pub(super) const fn new(request: ServeRequest) -> Self {
        Self { request, fault: None }
    }
}

/// The gateway that the last daemon was to serve. One by a section of the configuration file ends with that section.
pub(super) fn kept(store: &Store, settings: &Settings) -> Result<Option<Wanted>, StoreError> {
    let kept: Option<Option<Wanted>> = store.load(FILE)?;
    let kept = kept.flatten();
    if settings.openvpn.is_none() && kept.as_ref().is_some_and(|wanted| wanted.is_by_file) {
        store.save(FILE, &None::<Wanted>)?;
        return Ok(None);
    }
    Ok(kept)
}

/// Has the gateway serve as the configuration file says, until it does or a user has asked for something else.
pub(crate) async fn keep_section(gateway: Arc<Gateway>, pulse: Pulse) {
    pulse.wait(gateway.attachments.wait_restored()).await;
    while let Err(error) = pulse.wait(gateway.do_section()).await {
        let fault = format!("the section [openvpn] of the configuration file: {}", error.error);
        gateway.section.send_if_modified(|section| {
            let Some(section) = section.as_mut() else { return false };
            let is_new = section.fault.as_ref() != Some(&fault);
            if is_new {
                tracing::warn!(reason = fault, "the OpenVPN gateway does not serve as configured");
                section.fault = Some(fault);
            }
            is_new
        });
        pulse.wait(tokio::time::sleep(RETRY)).await;
    }
    pulse.wait(std::future::pending::<()>()).await;
}

impl Gateway {
    async fn do_section(&self) -> Result<(), ApiError> {
        let _one = self.changing.lock().await;
        let section = self.section.borrow().clone();
        let Some(Section { request, .. }) = section else { return Ok(()) };
        if self.imported()?.is_none() && self.authority_now().is_none() {
            self.fetch_authority(request.network.clone()).await?;
        }
        let wanted = Wanted { is_by_file: true, ..self.checked(request).await? };
        // Clients of a gateway that serves so already stay connected.
        if self.wanted_now().as_ref() != Some(&wanted) {
            self.set_wanted(Some(wanted)).await?;
        }
        self.section.send_replace(None);
        Ok(())
    }

    /// Why the gateway does not serve as the configuration file says.
    pub(super) fn section_fault(&self) -> Option<String> {
        self.section.borrow().as_ref()?.fault.clone()
    }

    /// The request of the configuration file, until it is done.
    pub(super) fn wanted_by_file(&self) -> Option<Wanted> {
        let request = self.section.borrow().as_ref()?.request.clone();
        Some(Wanted { request, is_by_file: true, ..Wanted::default() })
    }
}
