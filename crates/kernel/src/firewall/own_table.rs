//! A table of Weft's that is written as a whole, in nft's own language, and written again where another program has
//! changed it.

use serde_json::Value;

use super::nft::{TAG, Table};
use crate::{error::KernelError, handle::Kernel};

/// A table, and what was last written to it.
pub(super) struct OwnTable {
    kernel: Kernel,
    table: Table,
    /// What a write of it does, for errors.
    doing: &'static str,
    /// The content as it was written, and how `nft` shows it.
    written: Option<(Vec<String>, Vec<Value>)>,
}

impl OwnTable {
    /// Begins without a look at the table. Nothing is changed.
    pub(super) const fn new(kernel: Kernel, table: Table, doing: &'static str) -> Self {
        Self { kernel, table, doing, written: None }
    }

    /// Makes the table hold these lines and nothing else, if it does not. True if something was changed.
    ///
    /// # Errors
    /// [`KernelError::TableTaken`] if another program's table has the name, [`KernelError::NftMissing`],
    /// [`KernelError::NftRefused`], [`KernelError::Program`], [`KernelError::NotPermitted`].
    pub(super) async fn set(&mut self, lines: Vec<String>) -> Result<bool, KernelError> {
        let _one = self.kernel.inner.filters.lock().await;
        let found = self.kernel.nft_list_without_members(self.table).await?;
        if found.as_ref().is_some_and(|found| !found.is_ours()) {
            return Err(self.table.taken());
        }
        let is_whole = self.written.as_ref().is_some_and(|(of, shape)| {
            *of == lines && found.as_ref().is_some_and(|found| found.shape() == *shape)
        });
        if is_whole {
            return Ok(false);
        }
        self.written = None;
        self.kernel.nft_write(&text(self.table, &lines), self.doing).await?;
        let shape =
            self.kernel.nft_list_without_members(self.table).await?.map(|found| found.shape());
        self.written = shape.map(|shape| (lines, shape));
        Ok(true)
    }

    /// Removes the table. False if there was none.
    ///
    /// # Errors
    /// See [`Self::set`]; another program's table stays.
    pub(super) async fn remove(&mut self) -> Result<bool, KernelError> {
        self.written = None;
        let _one = self.kernel.inner.filters.lock().await;
        self.kernel.nft_remove(self.table).await
    }
}

/// All of it in one transaction, in the place of what is there.
fn text(Table { family, name }: Table, lines: &[String]) -> String {
    let lines = lines.join("\n");
    format!(
        "table {family} {name}\ndelete table {family} {name}\ntable {family} {name} {{\nchain {TAG} {{ }}\n{lines}\n}}\n"
    )
}
