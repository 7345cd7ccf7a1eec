//! `weft attach` and `weft detach`.

use weft_api::{ApiError, AttachRequest, Attachment, Detached, ErrorKind};
use weft_container::ContainerError;

use super::maker::Maker;
use super::names::check_name;
use super::wanted::Wanted;
use super::{Attachments, Saved};
use crate::devices::CONTAINER_INTERFACE;

impl Attachments {
    /// Serves `weft attach`. Attaching again adds explicit addresses, or changes nothing. A container that has
    /// come back gets the addresses kept for it.
    pub(crate) async fn attach(&self, request: AttachRequest) -> Result<Attachment, ApiError> {
        let sandbox = weft_container::resolve(&request.container, &self.resolve)
            .await
            .map_err(|error| ApiError::new(error_kind(&error), error))?;
        check_name("name", request.name.as_deref().unwrap_or(&sandbox.name))?;
        check_name("key", &sandbox.id)?;
        self.wait_restored().await;
        let mut inner = self.lock_for_request().await?;
        let sandbox = inner.known_as(sandbox);
        let wanted = Wanted {
            name: request.name.unwrap_or_else(|| sandbox.name.clone()),
            sandbox,
            maker: Maker::Command,
            aliases: Vec::new(),
            interface: CONTAINER_INTERFACE.into(),
            mac: None,
            addresses: request.addresses,
            enable_ipv6: request.ipv6,
            multicast_route: !request.no_multicast_route,
            default_route: request.default_route,
            masquerade: false,
        };
        Ok(self.put_in(&mut inner, wanted).await?.shown())
    }

    /// Serves `weft detach`, by any name that `attach` or `ps` knows the container by.
    pub(crate) async fn detach(&self, container: &str) -> Result<Detached, ApiError> {
        let resolved = weft_container::resolve(container, &self.resolve).await.ok();
        self.wait_restored().await;
        let mut inner = self.lock_for_request().await?;
        let by_key = |key: &str| inner.saved.get(key);
        let named = |is_meant: &dyn Fn(&Saved) -> bool| {
            let mut all = inner.saved.values();
            all.find(|saved| saved.attachment.name == container && is_meant(saved))
        };
        let found = resolved.as_ref().and_then(|sandbox| by_key(&sandbox.id));
        let found = found.or_else(|| inner.of_namespace(resolved.as_ref()?));
        let found = found.or_else(|| by_key(container));
        let found = found.or_else(|| named(&|it| it.maker.is_command() && !it.is_gone()));
        let found = found.or_else(|| named(&|it| it.maker.is_command()));
        let Some(saved) = found.or_else(|| named(&|_| true)).cloned() else {
            let text = format!("{container} is not attached; weft ps lists attached containers");
            return Err(ApiError::new(ErrorKind::NotFound, text));
        };
        if !saved.maker.is_command() {
            let (maker, remedy) = (saved.maker.name(), saved.maker.remedy());
            let text = format!("{container} was attached by {maker}: {remedy}");
            return Err(ApiError::new(ErrorKind::Conflict, text));
        }
        let id = saved.attachment.id.clone();
        self.end(&mut inner, &id).await?;
        Ok(Detached { id, addresses: saved.attachment.addresses })
    }
}

fn error_kind(error: &ContainerError) -> ErrorKind {
    match error {
        ContainerError::Invalid { .. } | ContainerError::HostNetwork { .. } => {
            ErrorKind::BadRequest
        }
        ContainerError::NotRunning { .. } => ErrorKind::Unavailable,
        _ => ErrorKind::NotFound,
    }
}
